#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace dflash {

// The candidates of the positions of one block, where a candidate's score depends on the one before
// it. On the host: a lattice is a few thousand numbers.
struct draft_lattice {
    int n = 0;                    // positions
    int k = 0;                    // candidates of each
    std::vector<int32_t> ids;     // [n, k], in any order
    std::vector<float> scores;    // [n, k, k]: of the latter after the former; the first position's
                                  // former is the anchor
    std::vector<float> log_mass;  // [n]: of the probability of all k; empty: they have all of it

    draft_lattice(int n_positions, int n_candidates)
        : n(n_positions),
          k(n_candidates),
          ids(static_cast<size_t>(n) * k),
          scores(static_cast<size_t>(n) * k * k) {}

    float & score(int position, int before, int candidate) {
        return scores[(static_cast<size_t>(position) * k + before) * k + candidate];
    }
};

// Where a lattice, or the candidates of independent positions, go. Positions have k candidates,
// best first.
struct draft_rows {
    int32_t * ids = nullptr;     // [n, k]
    float * logprobs = nullptr;  // [n, k], each after the best one of the position before
    float * steps = nullptr;     // [n, k, k], each after each of the position before; may be null

    // Those of one of several blocks.
    draft_rows of_block(int block, int n, int k) const {
        const size_t at = static_cast<size_t>(block) * n * k;
        return {ids + at, logprobs + at, steps != nullptr ? steps + at * k : nullptr};
    }
};

// Changes the log-probabilities, [k], of a position's candidates after a given one.
using weighing = std::function<void(int position, int32_t before, float * logprobs, int k)>;

// Follows the best step from each position to the next. Each position's candidates are ordered as
// they come after the path's token before it, equal ones by id; the first k of them are kept. The
// path is the first of each. anchor: the token before the first position.
// Throws backend_error for scores that are not numbers.
void follow(const draft_lattice & lattice, int32_t anchor, int k, const draft_rows & out,
            const weighing & weigh = {});

}  // namespace dflash
