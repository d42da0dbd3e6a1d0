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

// What was offered to one request last. What is written afterwards shows what it was worth, whether
// it was verified or not: so learning costs no rows.
class copy_offers {
  public:
    struct offer {
        std::vector<int32_t> tokens;
        std::vector<int32_t> kinds;
        std::vector<double> chances;
    };

    explicit copy_offers(copy_prior & prior) : chances(prior) {}

    // These tokens were written after the last offer, which is over: add them to the text.
    void learn(copy_index & index, const std::vector<int32_t> & written);

    // Look for at most `n_copies` continuations of at most `n_tokens` each. Gives whether one of
    // them may pay: whether at least `least[k]` of some first k + 1 tokens are expected to be
    // right. Without `least`, any may.
    bool find(copy_index & index, int n_copies, int n_tokens, const double * least, size_t n_least);

    copy_chances chances;
    std::vector<offer> last;
};

}  // namespace dflash
