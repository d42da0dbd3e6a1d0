#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

// All that is used of llama.cpp and ggml beyond their headers, in the one version of
// llama-cpp-python that is allowed at import: layouts of ggml's structs and classes (ggml-impl.h,
// ggml-backend-impl.h, ggml-cpu/traits.h and ggml-cuda/common.cuh), functions of llama.cpp's
// classes by their mangled names, and the order in which a hash set of the C++ library gives its
// numbers. `doubt_*` and `add_to_cpu` look whether it is all as expected.
namespace dflash::private_abi {

struct hash_set {
    size_t size;
    uint32_t * used;
    ggml_tensor ** keys;
};

// A `ggml_cgraph`.
struct graph {
    int size;
    int n_nodes;
    int n_leafs;
    ggml_tensor ** nodes;
    ggml_tensor ** grads;
    ggml_tensor ** grad_accs;
    ggml_tensor ** leafs;
    int32_t * use_counts;
    hash_set visited;
    int order;
    uint64_t uid;
};

// A `ggml_backend`.
struct backend {
    using compute_function = ggml_status (*)(ggml_backend_t, ggml_cgraph *);
    using optimize_function = void (*)(ggml_backend_t, ggml_cgraph *, void *);

    ggml_guid_t guid;
    const char * (*get_name)(ggml_backend_t);
    void (*free)(ggml_backend_t);
    void (*of_data[5])();
    void (*synchronize)(ggml_backend_t);
    void (*of_plans[4])();
    compute_function graph_compute;
    void (*of_events[2])();
    optimize_function graph_optimize;  // null for some backends
    ggml_backend_dev_t device;
    void * context;
};

// The head of a `ggml_backend_device`.
struct device {
    using init_function = ggml_backend_t (*)(ggml_backend_dev_t, const char *);
    using offload_function = bool (*)(ggml_backend_dev_t, const ggml_tensor *);

    const char * (*get_name)(ggml_backend_dev_t);
    void (*of_properties[4])();
    init_function init_backend;
    ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t);
    void (*of_buffers[2])();
    bool (*supports_op)(ggml_backend_dev_t, const ggml_tensor *);
    void (*of_buffer_types)();
    offload_function offload_op;  // null for some devices
};

// What each thread of the CPU's backend gets with an operation, a `ggml_compute_params`.
struct cpu_share {
    int thread, n_threads;
    size_t memory_size;
    void * memory;  // of all threads
    struct ggml_threadpool * pool;
    bool by_reference;
};

// A `ggml::cpu::tensor_traits`: does an operation in place of the CPU's backend.
class cpu_operation {
  public:
    virtual ~cpu_operation() = default;
    virtual bool memory_size(int n_threads, const ggml_tensor * op, size_t & size) = 0;
    virtual bool compute(cpu_share * share, ggml_tensor * op) = 0;
};

// A `ggml::cpu::extra_buffer_type`.
class cpu_operations {
  public:
    virtual ~cpu_operations() = default;
    virtual bool supports(ggml_backend_dev_t device, const ggml_tensor * op) = 0;
    // Null for all that the backend shall do itself.
    virtual cpu_operation * find(const ggml_tensor * op) = 0;
};

// Asks `ours` from now on before the CPU's backend computes. False if this build does not export
// what that takes, or is not as expected. No other thread may compute meanwhile.
bool add_to_cpu(cpu_operations * ours);
void remove_from_cpu(const cpu_operations * ours);

// For operations, once they were added: waits for the other threads, and a counter of all threads.
void wait_for_all(const cpu_share & share);
void start_count(const cpu_share & share, int n);
int count_one(const cpu_share & share);

inline graph & of(ggml_cgraph * g) { return *reinterpret_cast<graph *>(g); }
inline backend & of(ggml_backend_t b) { return *reinterpret_cast<backend *>(b); }
inline device & of(ggml_backend_dev_t d) { return *reinterpret_cast<device *>(d); }

// A graph of these nodes out of `whole`, as ggml_graph_view makes them.
graph part_of(const graph & whole, ggml_tensor ** nodes, int n);

// How often a node is a source of others, in the whole graph of which this one may be a part.
int n_uses(const graph & g, const ggml_tensor * node);

// Empty, or why ggml's graphs, this device, or this backend are not as expected.
std::string doubt_graphs();
std::string doubt_device(ggml_backend_dev_t device);
std::string doubt_backend(ggml_backend_t backend);

// The stream of a backend of CUDA, a CUstream; null if its context is not as expected.
void * stream_of(ggml_backend_t cuda);

// The tensors of a model by name. libllama exports this function of C++, but no header has it.
const std::vector<std::pair<std::string, ggml_tensor *>> & tensors_of(const llama_model * model);

// Lets the graphs of a context compute the hidden state that the heads for further tokens read for
// all rows, not only for those whose logits are wanted. This, too, is in no header.
void keep_states_of_all_rows(llama_context * ctx);

// A function of the library that the function `inside` is in; null if it does not export that, and
// under Windows, where only what is marked is exported.
void * symbol_beside(const void * inside, const char * name);

// The two parts of the memory of a context that has attention and recurrent layers. Null for a
// context of another kind, and if this build does not export the functions.
struct hybrid_memory {
    void * attention = nullptr;  // llama_kv_cache
    void * states = nullptr;     // llama_memory_recurrent

    static hybrid_memory of(llama_context * ctx);

    bool is_known() const { return attention != nullptr; }

    // llama_kv_cache::seq_rm: false, with nothing done, if it refuses.
    bool remove(llama_seq_id id, llama_pos begin, llama_pos end) const;
    // llama_memory_recurrent::seq_add
    void shift(llama_seq_id id, llama_pos by) const;
};

// A row's ids, in an order that makes llama.cpp use the first of them as the leading one.
//
// llama.cpp puts a row's ids into an unordered set. The set's first id says what the row attends
// to, and llama.cpp keeps its graph as long as these first ids stay the same for all rows. Which id
// comes first depends on the C++ library and on the order of insertion. If no order is found, the
// answer is the same, but the graph is built again.
std::vector<int32_t> leading_first(const std::vector<int32_t> & ids);

// Empty, or why rows of recurrent layers cannot be replayed, and why trees of equal shape may take
// new graphs.
std::string doubt_memory();
std::string doubt_order();

}  // namespace dflash::private_abi
