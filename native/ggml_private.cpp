#include "ggml_private.h"

#include <cstring>

#include "backend.h"

namespace dflash::ggml_private {

namespace {

constexpr int n_devices = 16, n_streams = 8;  // GGML_CUDA_MAX_DEVICES, GGML_CUDA_MAX_STREAMS

// The head of a `ggml_backend_cuda_context`.
struct cuda_context {
    int device;
    std::string name;
    void * copy_event;
    void * streams[n_devices][n_streams];
};

// Where a tensor is in the set, or the free place where its search ends.
size_t place_of(const hash_set & set, const ggml_tensor * t) {
    const size_t first = (reinterpret_cast<uintptr_t>(t) >> 4) % set.size;
    size_t at = first;
    while ((set.used[at / 32] >> at % 32 & 1) != 0 && set.keys[at] != t) {
        at = (at + 1) % set.size;
        if (at == first) {
            break;
        }
    }
    return at;
}

}  // namespace

graph part_of(const graph & whole, ggml_tensor ** nodes, int n) {
    graph part{};
    part.n_nodes = n;
    part.nodes = nodes;
    part.use_counts = whole.use_counts;
    part.visited = whole.visited;
    part.order = whole.order;
    return part;
}

int n_uses(const graph & g, const ggml_tensor * node) {
    const size_t at = place_of(g.visited, node);
    const bool known = (g.visited.used[at / 32] >> at % 32 & 1) != 0 && g.visited.keys[at] == node;
    return known ? g.use_counts[at] : 0;
}

std::string doubt_graphs() {
    const ggml_context_ptr context = new_nodes(8);
    ggml_tensor * a = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, 4);
    ggml_tensor * twice = ggml_add(context.get(), a, a);
    ggml_tensor * last = ggml_mul(context.get(), twice, a);
    ggml_cgraph * made = ggml_new_graph_custom(context.get(), 8, false);
    ggml_build_forward_expand(made, last);
    const graph & g = of(made);
    const bool known = g.size == ggml_graph_size(made) && g.n_nodes == 2 && g.n_leafs == 1 &&
                       g.nodes == ggml_graph_nodes(made) && g.nodes[0] == twice &&
                       g.grads == nullptr && g.leafs[0] == a && g.order == 0 && g.uid == 0 &&
                       n_uses(g, a) == 3 && n_uses(g, twice) == 1 && n_uses(g, last) == 0;
    return known ? "" : "ggml's graphs are not laid out as expected";
}

std::string doubt_device(ggml_backend_dev_t d) {
    const bool known = of(d).get_name != nullptr && of(d).init_backend != nullptr &&
                       of(d).get_name(d) == ggml_backend_dev_name(d);
    return known ? "" : "ggml's devices are not laid out as expected";
}

std::string doubt_backend(ggml_backend_t b) {
    const backend & known = of(b);
    const bool is_known = known.guid == ggml_backend_guid(b) && known.get_name != nullptr &&
                          known.get_name(b) == ggml_backend_name(b) &&
                          known.device == ggml_backend_get_device(b) && known.free != nullptr &&
                          known.graph_compute != nullptr && known.context != nullptr;
    return is_known ? "" : "ggml's backends are not laid out as expected";
}

void * stream_of(ggml_backend_t cuda) {
    const char * name = ggml_backend_name(cuda);  // that of the context
    const auto & context = *static_cast<const cuda_context *>(of(cuda).context);
    const size_t length = std::strlen(name);
    // Of an unknown layout no member is followed before all that can be compared was.
    if (context.device < 0 || context.device >= n_devices || context.name.size() != length ||
        context.name.data() != name || "CUDA" + std::to_string(context.device) != name) {
        return nullptr;
    }
    of(cuda).synchronize(cuda);  // makes the stream
    for (int d = 0; d < n_devices; d++) {
        for (int s = 0; s < n_streams; s++) {
            if ((context.streams[d][s] != nullptr) != (d == context.device && s == 0)) {
                return nullptr;
            }
        }
    }
    return context.streams[context.device][0];
}

}  // namespace dflash::ggml_private
