#pragma once

#include <cstdint>
#include <vector>

namespace dflash {

constexpr double least_chance = 1e-12;  // its logarithm is finite

// Nodes of a draft, parents before their children; -1 is the anchor.
struct draft_tree {
    std::vector<int32_t> tokens;
    std::vector<int32_t> parents;
    std::vector<float> logprobs;  // of each token at its position
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

}  // namespace dflash
