#include "top_k.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "largest.h"

namespace dflash {

void sort_best_first(int32_t * ids, float * logprobs, int n) {
    std::vector<std::pair<float, int32_t>> pairs(n);
    for (int i = 0; i < n; i++) {
        pairs[i] = {-logprobs[i], ids[i]};
    }
    std::sort(pairs.begin(), pairs.end());
    for (int i = 0; i < n; i++) {
        logprobs[i] = -pairs[i].first;
        ids[i] = pairs[i].second;
    }
}

void top_k_of(const std::vector<float> & logits, int k, int32_t * ids, float * logprobs) {
    largest_of(logits.data(), static_cast<int>(logits.size()), k, ids, logprobs);
    const float largest = logprobs[0];
    double sum = 0.0;
    for (const float x : logits) {
        sum += std::exp(static_cast<double>(x - largest));
    }
    const auto norm = static_cast<float>(std::log(sum));
    for (int i = 0; i < k; i++) {
        logprobs[i] -= largest + norm;
    }
}

}  // namespace dflash
