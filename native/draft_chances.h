#pragma once

#include <array>
#include <vector>

namespace dflash {

// The chance that a drafter's first choices are accepted, by its confidence, as outcomes correct
// it: an extended Kalman filter. See dflash_local/controller/acceptance.py for the formula.
class draft_chances {
  public:
    // `a`, `b`, and the variances of `a`, of both together, and of `b`.
    using numbers = std::array<double, 5>;

    // `walk` is the variance that a round adds to that of `a`, up to `most`.
    draft_chances(const numbers & known, double walk, double most)
        : state(known), walk_(walk), most_(most) {}

    // The chance of each token of a chain, if all before it are accepted.
    std::vector<double> each(const std::vector<double> & logprobs) const;

    // Of the tokens of a chain that were looked at, the first `n_right` were accepted.
    void learn(const std::vector<double> & logprobs, int n_right);

    numbers state;

  private:
    double walk_, most_;
};

}  // namespace dflash
