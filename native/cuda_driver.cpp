#include "cuda_driver.h"

#include <iterator>
#include <type_traits>
#include <utility>

#include "errors.h"

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace dflash::cuda {

namespace {

using status = int;
constexpr status ok = 0, not_found = 500, not_ready = 600;

// Of cuda.h.
constexpr int attribute_processors = 16, attribute_major = 75, attribute_minor = 76,
              attribute_shared_per_block = 97;
constexpr int function_shared_bytes = 8;
constexpr int launch_early = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr int capture_relaxed = 2;
constexpr int node_of_graph = 4;

struct launch_attribute {
    int id;
    char padding[4];
    union {
        char bytes[64];
        int early;
    } value;
};
static_assert(sizeof(launch_attribute) == 72, "CUlaunchAttribute");

struct launch_config {
    unsigned grid[3], block[3];
    unsigned shared_bytes;
    stream on;
    launch_attribute * attributes;
    unsigned n_attributes;
};
static_assert(sizeof(launch_config) == 56, "CUlaunchConfig");

void * open_library() {
#ifdef _WIN32
    return reinterpret_cast<void *>(LoadLibraryA("nvcuda.dll"));
#else
    return dlopen("libcuda.so.1", RTLD_NOW);
#endif
}

void * find_symbol(void * library, const char * name) {
#ifdef _WIN32
    return reinterpret_cast<void *>(GetProcAddress(static_cast<HMODULE>(library), name));
#else
    return dlsym(library, name);
#endif
}

struct driver {
    driver() {
        void * library = open_library();
        if (library == nullptr) {
            why_not = "there is no NVIDIA driver";
            return;
        }
        const auto find = [&](auto & f, const char * name) {
            f = reinterpret_cast<std::decay_t<decltype(f)>>(find_symbol(library, name));
            if (f == nullptr && why_not.empty()) {
                why_not = std::string("the NVIDIA driver is too old: it has no ") + name;
            }
        };
        find(init, "cuInit");
        find(error_string, "cuGetErrorString");
        find(version, "cuDriverGetVersion");
        find(device_by_bus, "cuDeviceGetByPCIBusId");
        find(device_attribute, "cuDeviceGetAttribute");
        find(set_context, "cuCtxSetCurrent");
        find(context_device, "cuCtxGetDevice");
        find(stream_context, "cuStreamGetCtx");
        find(module_load, "cuModuleLoadData");
        find(module_unload, "cuModuleUnload");
        find(module_function, "cuModuleGetFunction");
        find(function_set, "cuFuncSetAttribute");
        find(launch_kernel, "cuLaunchKernelEx");
        find(allocate, "cuMemAlloc_v2");
        find(release, "cuMemFree_v2");
        find(fill, "cuMemsetD8Async");
        find(to_host, "cuMemcpyDtoH_v2");
        find(capture_begin, "cuStreamBeginCapture_v2");
        find(capture_end, "cuStreamEndCapture");
        find(graph_destroy, "cuGraphDestroy");
        find(graph_nodes, "cuGraphGetNodes");
        find(node_type, "cuGraphNodeGetType");
        find(graph_instantiate, "cuGraphInstantiateWithFlags");
        find(graph_launch, "cuGraphLaunch");
        find(executable_destroy, "cuGraphExecDestroy");
        find(event_create, "cuEventCreate");
        find(event_destroy, "cuEventDestroy_v2");
        find(event_record, "cuEventRecord");
        find(event_query, "cuEventQuery");
        find(event_wait, "cuEventSynchronize");
        find(event_elapsed, "cuEventElapsedTime");
        if (why_not.empty() && init(0) != ok) {
            why_not = "the NVIDIA driver does not start";
        }
    }

    std::string why_not;
    status (*init)(unsigned) = nullptr;
    status (*error_string)(status, const char **) = nullptr;
    status (*version)(int *) = nullptr;
    status (*device_by_bus)(int *, const char *) = nullptr;
    status (*device_attribute)(int *, int, int) = nullptr;
    status (*set_context)(context) = nullptr;
    status (*context_device)(int *) = nullptr;
    status (*stream_context)(stream, context *) = nullptr;
    status (*module_load)(module_handle *, const void *) = nullptr;
    status (*module_unload)(module_handle) = nullptr;
    status (*module_function)(function *, module_handle, const char *) = nullptr;
    status (*function_set)(function, int, int) = nullptr;
    status (*launch_kernel)(const launch_config *, function, void **, void **) = nullptr;
    status (*allocate)(address *, size_t) = nullptr;
    status (*release)(address) = nullptr;
    status (*fill)(address, unsigned char, size_t, stream) = nullptr;
    status (*to_host)(void *, address, size_t) = nullptr;
    status (*capture_begin)(stream, int) = nullptr;
    status (*capture_end)(stream, graph_handle *) = nullptr;
    status (*graph_destroy)(graph_handle) = nullptr;
    status (*graph_nodes)(graph_handle, void **, size_t *) = nullptr;
    status (*node_type)(void *, int *) = nullptr;
    status (*graph_instantiate)(void **, graph_handle, unsigned long long) = nullptr;
    status (*graph_launch)(void *, stream) = nullptr;
    status (*executable_destroy)(void *) = nullptr;
    status (*event_create)(event_handle *, unsigned) = nullptr;
    status (*event_destroy)(event_handle) = nullptr;
    status (*event_record)(event_handle, stream) = nullptr;
    status (*event_query)(event_handle) = nullptr;
    status (*event_wait)(event_handle) = nullptr;
    status (*event_elapsed)(float *, event_handle, event_handle) = nullptr;
};

// Opened once and never closed, like every library of CUDA.
const driver & loaded() {
    static const driver d;
    return d;
}

const driver & known() {
    if (!loaded().why_not.empty()) {
        throw backend_error(loaded().why_not);
    }
    return loaded();
}

void check(status s, const char * what) {
    if (s != ok) {
        const char * words = nullptr;
        loaded().error_string(s, &words);
        throw backend_error(std::string("CUDA cannot ") + what + ": " +
                            (words != nullptr ? words : "error " + std::to_string(s)));
    }
}

int attribute(int device, int which) {
    int value = 0;
    check(known().device_attribute(&value, which, device), "describe the GPU");
    return value;
}

gpu described(int device) {
    return {device, attribute(device, attribute_major), attribute(device, attribute_minor),
            attribute(device, attribute_processors), attribute(device, attribute_shared_per_block)};
}

}  // namespace

bool is_there(std::string & why_not) {
    why_not = loaded().why_not;
    return why_not.empty();
}

int driver_version() {
    int version = 0;
    check(known().version(&version), "tell its version");
    return version;
}

gpu gpu_at(const char * pci_bus_id) {
    int device = 0;
    check(known().device_by_bus(&device, pci_bus_id), "find the GPU");
    return described(device);
}

gpu gpu_of(context c) {
    use(c);
    int device = 0;
    check(known().context_device(&device), "find the GPU");
    return described(device);
}

context context_of(stream s) {
    context found = nullptr;
    check(known().stream_context(s, &found), "use ggml's stream");
    return found;
}

void use(context c) { check(known().set_context(c), "use the GPU"); }

void module_unloader::operator()(void * module) const { loaded().module_unload(module); }

module_ptr load_module(const std::string & cubin) {
    module_handle m = nullptr;
    check(known().module_load(&m, cubin.data()), "load kernels");
    return module_ptr(m);
}

function find_function(module_handle m, const char * name) {
    function f = nullptr;
    const status s = known().module_function(&f, m, name);
    if (s == not_found) {
        return nullptr;
    }
    check(s, "find a kernel");
    return f;
}

void allow_shared_memory(function f, int n_bytes) {
    check(known().function_set(f, function_shared_bytes, n_bytes), "reserve shared memory");
}

void launch(function f, const launch_size & size, bool early, stream s, void * parameters) {
    launch_attribute attribute{};
    attribute.id = launch_early;
    attribute.value.early = 1;
    const launch_config config{
        {size.x, size.y, size.z},     {size.threads, 1, 1}, size.shared_bytes, s,
        early ? &attribute : nullptr, early ? 1u : 0u};
    void * all[] = {parameters};
    check(known().launch_kernel(&config, f, all, nullptr), "launch a kernel");
}

memory::memory(size_t n) : size_(n) { check(known().allocate(&at_, n), "allocate memory"); }

memory::~memory() {
    if (at_ != 0) {
        loaded().release(at_);
    }
}

void set_zero(const memory & m, stream s) {
    check(known().fill(m.at(), 0, m.size(), s), "clear memory");
}

void copy_to_host(void * to, address from, size_t n) {
    check(known().to_host(to, from, n), "copy to the host");
}

void begin_capture(stream s) { check(known().capture_begin(s, capture_relaxed), "begin a graph"); }

void graph_destroyer::operator()(void * graph) const { loaded().graph_destroy(graph); }

void executable_destroyer::operator()(void * graph) const { loaded().executable_destroy(graph); }

executable_ptr end_capture(stream s) {
    graph_handle made = nullptr;
    check(known().capture_end(s, &made), "end a graph");
    const std::unique_ptr<void, graph_destroyer> owned(made);
    void * executable = nullptr;
    check(known().graph_instantiate(&executable, made, 0), "make a graph");
    return executable_ptr(executable);
}

void abandon_capture(stream s) noexcept {
    graph_handle made = nullptr;
    loaded().capture_end(s, &made);
    if (made != nullptr) {
        loaded().graph_destroy(made);
    }
}

bool end_capture_of_launch(stream s) {
    graph_handle made = nullptr;
    check(known().capture_end(s, &made), "end a graph");
    const std::unique_ptr<void, graph_destroyer> owned(made);
    void * nodes[8];
    size_t n = std::size(nodes);
    check(known().graph_nodes(made, nodes, &n), "read a graph");
    for (size_t i = 0; i < n; i++) {
        int type = 0;
        check(known().node_type(nodes[i], &type), "read a graph");
        if (type == node_of_graph) {
            return true;
        }
    }
    return false;
}

void launch(const executable_ptr & graph, stream s) {
    check(known().graph_launch(graph.get(), s), "launch a graph");
}

event::event() { check(known().event_create(&event_, 0), "make an event"); }

event::~event() { loaded().event_destroy(event_); }

void event::record(stream s) { check(known().event_record(event_, s), "record an event"); }

bool event::has_passed() const {
    const status s = known().event_query(event_);
    if (s == not_ready) {
        return false;
    }
    check(s, "run kernels");
    return true;
}

void event::wait() const { check(known().event_wait(event_), "run kernels"); }

float event::ms_since(const event & earlier) const {
    float ms = 0.0f;
    check(known().event_elapsed(&ms, earlier.event_, event_), "measure time");
    return ms;
}

}  // namespace dflash::cuda
