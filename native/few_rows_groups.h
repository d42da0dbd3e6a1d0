#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "cuda/arguments.h"
#include "few_rows_kernel.h"
#include "private_abi.h"

namespace dflash {

// One product and what is done with its result at once.
struct few_rows_chain {
    int node = 0;                       // of the product
    int last = 0;                       // the node whose result is written
    int64_t first_row = 0, n_rows = 0;  // of the matrix
    const ggml_tensor * bias = nullptr;
    int sigmoid = -1;  // a node: the result is multiplied by it, a number for each column
    const ggml_tensor * gate = nullptr;          // what that is made of
    std::vector<const ggml_tensor *> residuals;  // that are added, up to two

    // What is read of other nodes' results when the chain's is written.
    std::vector<const ggml_tensor *> reads() const {
        std::vector<const ggml_tensor *> all = residuals;
        if (gate != nullptr) {
            all.push_back(gate);
        }
        return all;
    }
};

// Products with one input that may share a launch. The units of a part are chosen for all of them,
// also where memory then forbids the one launch: else a column's bits would depend on where the
// columns beside it made ggml put things.
struct few_rows_group {
    std::vector<few_rows_chain> chains;  // with an activation: the gate, then the values
    int activation_node = -1;
    int units_per_part = 0;
};

// The nodes of a graph, as far as they are products of ours: which of them there are, what is done
// with their results, and which may share a launch.
class few_rows_graph {
  public:
    // `any_shape`: all is decided by operations and weights alone, whatever the shapes of the rest.
    few_rows_graph(const private_abi::graph & g, const few_rows_rules & rules,
                   bool any_shape = false);

    // No node is in two of them. Call it once.
    std::vector<few_rows_group> groups();

    int size() const { return g_.n_nodes; }
    ggml_tensor & operator[](int node) const { return *g_.nodes[node]; }
    int index_of(const ggml_tensor * node) const { return index_.at(node); }
    // -1: it is no node, or users are not known, as nothing is ours.
    int find(const ggml_tensor * node) const {
        const auto found = index_.find(node);
        return found == index_.end() ? -1 : found->second;
    }

    // The only node that reads this one's result, if nobody else can see it; -1: none.
    int only_user(int node) const;

    // A product, with its bias.
    few_rows_chain chain_of(int node) const;
    // Its nodes, the product first.
    std::vector<int> nodes_of(const few_rows_chain & c) const;
    // Leaves the chain's last node to ggml. It must have more than one.
    void shorten(few_rows_chain & c) const;

    few_rows_kernel::operand operand(int node) const;
    // The block types of a launch; false if there are more than two.
    bool operands(const std::vector<few_rows_chain> & chains, few_rows_kernel & kernel) const;

  private:
    enum class state : char { of_ggml, candidate, grouped };

    bool is_ours(const ggml_tensor & t) const;
    void find_users();
    void use(const ggml_tensor * source, int by);
    bool is_result(const ggml_tensor & t) const;
    bool is_sum_of(int node, const ggml_tensor & part) const;
    void add_bias(few_rows_chain & c) const;
    void add_gate(few_rows_chain & c) const;
    void add_residual(few_rows_chain & c) const;
    int product_behind(const ggml_tensor * source, int activation) const;
    bool has_kernel(const std::vector<few_rows_chain> & chains) const;
    void group_activations(std::vector<few_rows_group> & found);
    void group_products(std::vector<few_rows_group> & found);

    const private_abi::graph & g_;
    const few_rows_rules & rules_;
    const bool any_shape_;
    bool is_any_ours_ = false;
    std::vector<state> state_;
    std::unordered_map<const ggml_tensor *, int> index_;
    std::vector<int> user_, n_users_;  // the last reader of each node, and how many there are
};

few_rows::activation activation_of(const ggml_tensor & t);

// Nodes that only describe memory, or that ggml skips.
bool is_idle(const ggml_tensor & t);
bool is_float_matrix(const ggml_tensor & t);
inline bool is_computed(const ggml_tensor & t) { return (t.flags & GGML_TENSOR_FLAG_COMPUTE) != 0; }

inline int blocks_of(int64_t rows, int block_rows) {
    return static_cast<int>((rows + block_rows - 1) / block_rows);
}

// Moves products that may share a launch next to each other, before ggml gives tensors their
// memory: else it often gives one the place of another. True if any was moved.
bool order_few_rows(const private_abi::graph & graph, const few_rows_rules & rules);

// The same, and what it comes to is kept: llama.cpp builds the graph of a model at the same
// addresses again, whatever its rows, and an order knows nothing of rows.
class known_orders {
  public:
    void order(const private_abi::graph & graph, const few_rows_rules & rules);

  private:
    std::map<std::vector<uintptr_t>, std::vector<int>> known_;  // by nodes and their sources
    std::vector<uintptr_t> key_;
};

}  // namespace dflash
