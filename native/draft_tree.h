#pragma once

#include <cstdint>
#include <vector>

namespace dflash {

// Nodes of a draft, parents before their children; -1 is the anchor.
struct draft_tree {
    std::vector<int32_t> tokens;
    std::vector<int32_t> parents;
    std::vector<float> logprobs;  // of each token at its position
};

// A draft with copies of the text: `logprobs` are those of each node where its parent is right.
struct joined_draft : draft_tree {
    std::vector<bool> copied;
    std::vector<double> chances;  // of each node and all before it, falling
};

// Tokens that may follow the anchor, with the chance of each where all before it are right.
struct copied_text {
    std::vector<int32_t> tokens;
    std::vector<double> chances;
};

// How far a tree may grow.
struct tree_bounds {
    int n_nodes;
    int n_leaves;
    int n_depth;
};

// The best tree of a block's candidates, ids and log-probabilities [n_positions, k], each row best
// first. steps: null, or [n_positions, k, k], the log-probability of each candidate after each one
// of the position before, which then counts. further_share: by which the chances of nodes shrink
// whose parents are not on the path of first candidates. See dflash_local/draft/tree.py.
draft_tree grow_tree(const int32_t * ids, const float * logprobs, const float * steps,
                     int n_positions, int k, int n_vocab, const tree_bounds & bounds,
                     double further_share = 1.0);

// Corrects a block's log-probabilities, in place, by the chance of each position's first candidate:
// the others share the rest as before. See dflash_local/controller/acceptance.py.
void rate_candidates(float * logprobs, float * steps, const std::vector<double> & chances, int k);

// The best draft of at most so many nodes and leaves from a drafter's nodes and copies, without
// bound in depth. `chances`: of each node with all before it; nodes without one are left out. See
// dflash_local/copies/join.py.
joined_draft join_copies(const std::vector<int32_t> & tokens, const std::vector<int32_t> & parents,
                         const std::vector<double> & chances,
                         const std::vector<copied_text> & copies, int n_nodes, int n_leaves);

}  // namespace dflash
