#include "graph_content.h"

#include <cstring>

namespace dflash {

namespace {

constexpr int n_words_of_params = GGML_MAX_OP_PARAMS / sizeof(uint64_t);

// The nodes of a graph by their addresses: an open table, as a graph has thousands of sources.
class node_table {
  public:
    explicit node_table(const private_abi::graph & g) {
        size_t size = 64;
        while (size < static_cast<size_t>(g.n_nodes) * 2) {
            size *= 2;
        }
        places_.resize(size, {nullptr, -1});
        for (int i = 0; i < g.n_nodes; i++) {
            place(g.nodes[i]) = {g.nodes[i], i};
        }
    }
    // -1: it is none.
    int find(const ggml_tensor * t) { return place(t).index; }

  private:
    struct entry {
        const ggml_tensor * node;
        int index;
    };
    entry & place(const ggml_tensor * t) {
        size_t at = reinterpret_cast<uintptr_t>(t) / sizeof(ggml_tensor) & (places_.size() - 1);
        while (places_[at].node != nullptr && places_[at].node != t) {
            at = (at + 1) & (places_.size() - 1);
        }
        return places_[at];
    }
    std::vector<entry> places_;
};

}  // namespace

graph_content::graph_content(const private_abi::graph & g) {
    node_table nodes(g);
    words_.reserve(static_cast<size_t>(g.n_nodes) * 32);
    for (int i = 0; i < g.n_nodes; i++) {
        const ggml_tensor & t = *g.nodes[i];
        add(t);
        words_.push_back(static_cast<uint64_t>(t.op) << 32 | static_cast<uint32_t>(t.flags));
        uint64_t params[n_words_of_params];
        std::memcpy(params, t.op_params, sizeof(params));
        int n = n_words_of_params;
        while (n > 0 && params[n - 1] == 0) {
            n--;
        }
        words_.push_back(n);
        words_.insert(words_.end(), params, params + n);
        for (int s = 0; s < GGML_MAX_SRC; s++) {
            if (t.src[s] == nullptr) {
                continue;
            }
            const int source = nodes.find(t.src[s]);
            words_.push_back(static_cast<uint64_t>(s) << 32 | static_cast<uint32_t>(source));
            if (source < 0) {
                add(*t.src[s]);
            }
        }
    }
    hash_ = words_.size();
    for (const uint64_t word : words_) {
        hash_ = (hash_ ^ word) * 0x9e3779b97f4a7c15;
        hash_ ^= hash_ >> 29;
    }
}

void graph_content::add(const ggml_tensor & t) {
    words_.push_back(reinterpret_cast<uintptr_t>(t.data));
    words_.push_back(t.type);
    words_.insert(words_.end(), t.ne, t.ne + GGML_MAX_DIMS);
    words_.insert(words_.end(), t.nb, t.nb + GGML_MAX_DIMS);
}

}  // namespace dflash
