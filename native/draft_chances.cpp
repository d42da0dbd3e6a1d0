#include "draft_chances.h"

#include <algorithm>
#include <cmath>

namespace dflash {

namespace {

constexpr double floor_of_logprobs = -20.0, nudge = 0.001;  // keep logarithms finite
// Of a drafter that gives no probabilities: about 0.7, before it is learnt.
constexpr double no_confidence = 1.0;

bool tells(const std::vector<double> & logprobs) {
    return std::any_of(logprobs.begin(), logprobs.end(), [](double lp) { return lp != 0.0; });
}

double confidence(double logprob) {
    // What is no number counts as no confidence.
    const double known = logprob > floor_of_logprobs ? logprob : floor_of_logprobs;
    return -std::log(nudge - std::min(known, 0.0));
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

}  // namespace

std::vector<double> draft_chances::each(const std::vector<double> & logprobs) const {
    const bool has_told = tells(logprobs);
    std::vector<double> found;
    found.reserve(logprobs.size());
    for (const double lp : logprobs) {
        found.push_back(sigmoid(state[0] + state[1] * (has_told ? confidence(lp) : no_confidence)));
    }
    return found;
}

void draft_chances::learn(const std::vector<double> & logprobs, int n_right) {
    auto & [a, b, aa, ab, bb] = state;
    const bool has_told = tells(logprobs);
    aa = std::min(aa + walk_, most_);
    for (size_t j = 0; j < logprobs.size(); j++) {
        const double x = has_told ? confidence(logprobs[j]) : no_confidence;
        const double q = sigmoid(a + b * x);
        const double to_a = aa + ab * x, to_b = ab + bb * x;
        const double spread = q * (1.0 - q);
        const double gain = 1.0 / (1.0 + spread * (to_a + x * to_b));
        const double miss = (static_cast<int>(j) < n_right ? 1.0 : 0.0) - q;
        a += to_a * gain * miss;
        b += to_b * gain * miss;
        aa -= gain * spread * to_a * to_a;
        ab -= gain * spread * to_a * to_b;
        bb -= gain * spread * to_b * to_b;
    }
    b = std::max(b, 0.0);
}

}  // namespace dflash
