#pragma once

#include <cstdint>
#include <vector>

#include "draft_tree.h"

namespace dflash {

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

// The best draft of at most so many nodes and leaves from a drafter's nodes and copies, without
// bound in depth. `chances`: of each node with all before it; nodes without one are left out. See
// dflash_local/copies/join.py.
joined_draft join_copies(const std::vector<int32_t> & tokens, const std::vector<int32_t> & parents,
                         const std::vector<double> & chances,
                         const std::vector<copied_text> & copies, int n_nodes, int n_leaves);

}  // namespace dflash
