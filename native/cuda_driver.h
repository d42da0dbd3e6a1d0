#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

// NVIDIA's driver, opened when it is first asked for: nothing is linked, and no toolkit is needed
// to build this. Calls throw backend_error with the driver's own words.
namespace dflash::cuda {

using context = void *;
using module_handle = void *;
using function = void *;
using stream = void *;
using event_handle = void *;
using graph_handle = void *;
using address = unsigned long long;

// Whether there is a driver; `why_not` gets the reason.
bool is_there(std::string & why_not);

// As CUDA counts versions: 12040 is 12.4.
int driver_version();

// One GPU as the driver describes it.
struct gpu {
    int device = 0;
    int major = 0, minor = 0;  // compute capability
    int n_processors = 0;
    int shared_per_block = 0;  // bytes that a block may ask for
};
gpu gpu_at(const char * pci_bus_id);
gpu gpu_of(context c);

context context_of(stream s);
// Makes it the one that this thread's calls are about.
void use(context c);

struct module_unloader {
    void operator()(void * module) const;
};
using module_ptr = std::unique_ptr<void, module_unloader>;
module_ptr load_module(const std::string & cubin);
// Null if the module has none of this name.
function find_function(module_handle m, const char * name);
void allow_shared_memory(function f, int n_bytes);

struct launch_size {
    unsigned x = 1, y = 1, z = 1;
    unsigned threads = 1;
    unsigned shared_bytes = 0;
};
// `early`: as a programmatic dependent launch, which may begin before the kernel before it has
// ended.
void launch(function f, const launch_size & size, bool early, stream s, void * parameters);

// Memory of a GPU, of one context.
class memory {
  public:
    memory() = default;
    explicit memory(size_t n);
    memory(memory && other) noexcept { *this = std::move(other); }
    memory & operator=(memory && other) noexcept {
        std::swap(at_, other.at_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~memory();

    address at() const { return at_; }
    size_t size() const { return size_; }

  private:
    address at_ = 0;
    size_t size_ = 0;
};
void set_zero(const memory & m, stream s);
void copy_to_host(void * to, address from, size_t n);

void begin_capture(stream s);
struct graph_destroyer {
    void operator()(void * graph) const;
};
struct executable_destroyer {
    void operator()(void * graph) const;
};
using executable_ptr = std::unique_ptr<void, executable_destroyer>;
// Ends it also when it throws.
executable_ptr end_capture(stream s);
void abandon_capture(stream s) noexcept;
// Ends it, and says whether a graph was launched in it.
bool end_capture_of_launch(stream s);
void launch(const executable_ptr & graph, stream s);

class event {
  public:
    event();
    event(const event &) = delete;
    event & operator=(const event &) = delete;
    ~event();

    void record(stream s);
    bool has_passed() const;
    void wait() const;
    float ms_since(const event & earlier) const;

  private:
    event_handle event_ = nullptr;
};

}  // namespace dflash::cuda
