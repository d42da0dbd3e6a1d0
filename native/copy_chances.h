#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy_index.h"

namespace dflash {

// How likely copied tokens are to be accepted. Each is of a *kind*: one of the index's cells, and
// what a drafter thinks of the token: 0, it has none there; 1, it has the same; 2, another. For
// each kind it is counted how often the token was right where all before it were.
constexpr int n_copy_kinds = 3 * copy_index::n_cells;

// What a request begins with, learnt from those before it. One per model.
struct copy_prior {
    std::vector<double> tried;  // by kind
    std::vector<double> right;

    copy_prior();

    // What became of one token of any request.
    void learn(int kind, bool is_right);
};

// What is known of one request's copies. The prior must outlive it.
class copy_chances {
  public:
    explicit copy_chances(copy_prior & prior);

    // The chance of each token that it is right where all before it are.
    std::vector<double> each(const std::vector<int32_t> & kinds);

    // What became of one token of this request.
    void learn(int kind, bool is_right);

    // So many tokens were written that no copy was offered for.
    void learn_silence(int n);

  private:
    double chance(int kind) const;
    void expect(bool is_long, double chance, bool is_right);

    copy_prior & prior_;
    std::array<double, n_copy_kinds> tried_ = {};
    std::array<double, n_copy_kinds> right_ = {};
    std::array<double, n_copy_kinds> known_;  // each chance, once it was asked for; else negative
    // For short and for long matches: right ones that were expected, and that there were.
    std::array<double, 2> expected_ = {1.0, 1.0};
    std::array<double, 2> seen_ = {1.0, 1.0};
};

}  // namespace dflash
