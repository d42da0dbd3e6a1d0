#include "graph_content.h"

#include <algorithm>
#include <cstring>

namespace dflash {

namespace {

constexpr int n_words_of_params = GGML_MAX_OP_PARAMS / sizeof(uint64_t);
constexpr int of_tensor = 2 + 2 * GGML_MAX_DIMS;
constexpr int most_of_node = of_tensor + 2 + n_words_of_params + GGML_MAX_SRC * (1 + of_tensor);

uint64_t * add(const ggml_tensor & t, uint64_t * to) {
    *to++ = reinterpret_cast<uintptr_t>(t.data);
    *to++ = t.type;
    to = std::copy_n(t.ne, GGML_MAX_DIMS, to);
    return std::copy_n(t.nb, GGML_MAX_DIMS, to);
}

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

// Four chains beside each other: a processor multiplies faster than one can wait for.
uint64_t hash_of(const std::vector<uint64_t> & words) {
    uint64_t chains[4] = {1, 2, 3, 4};
    for (size_t i = 0; i < words.size(); i++) {
        uint64_t & chain = chains[i % 4];
        chain = (chain ^ words[i]) * 0x9e3779b97f4a7c15;
        chain ^= chain >> 29;
    }
    uint64_t hash = words.size();
    for (const uint64_t chain : chains) {
        hash = (hash ^ chain) * 0x9e3779b97f4a7c15;
        hash ^= hash >> 29;
    }
    return hash;
}

}  // namespace

void graph_content::read(const private_abi::graph & g) {
    node_table nodes(g);
    // Words are written to memory that is there, and counted: to add them one by one takes as long
    // as all the rest.
    words_.resize(std::max(words_.capacity(), static_cast<size_t>(g.n_nodes) * 32));
    size_t n = 0;
    for (int i = 0; i < g.n_nodes; i++) {
        if (words_.size() - n < most_of_node) {
            words_.resize(2 * words_.size() + most_of_node);
        }
        const ggml_tensor & t = *g.nodes[i];
        uint64_t * to = add(t, words_.data() + n);
        *to++ = static_cast<uint64_t>(t.op) << 32 | static_cast<uint32_t>(t.flags);
        uint64_t params[n_words_of_params];
        std::memcpy(params, t.op_params, sizeof(params));
        int n_params = n_words_of_params;
        while (n_params > 0 && params[n_params - 1] == 0) {
            n_params--;
        }
        *to++ = n_params;
        to = std::copy_n(params, n_params, to);
        for (int s = 0; s < GGML_MAX_SRC; s++) {
            if (t.src[s] == nullptr) {
                continue;
            }
            const int source = nodes.find(t.src[s]);
            *to++ = static_cast<uint64_t>(s) << 32 | static_cast<uint32_t>(source);
            if (source < 0) {
                to = add(*t.src[s], to);
            }
        }
        n = to - words_.data();
    }
    words_.resize(n);
    hash_ = hash_of(words_);
}

}  // namespace dflash
