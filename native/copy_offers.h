#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy_chances.h"
#include "copy_index.h"

namespace dflash {

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
