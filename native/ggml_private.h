#pragma once

#include <cstdint>
#include <string>

#include "ggml-backend.h"
#include "ggml.h"

// The parts of ggml that it keeps to itself and that products of few rows need: which of its
// functions runs a graph, which nodes a graph has, and on which stream the CUDA backend runs them.
// The layouts are those of ggml-impl.h, ggml-backend-impl.h and ggml-cuda/common.cuh in the one
// version of llama-cpp-python that is allowed at import. `doubt_*` look whether they hold.
namespace dflash::ggml_private {

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

    const char * (*get_name)(ggml_backend_dev_t);
    void (*of_properties[4])();
    init_function init_backend;
};

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

}  // namespace dflash::ggml_private
