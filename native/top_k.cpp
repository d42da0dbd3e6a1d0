#include "top_k.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

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
    std::vector<int32_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int32_t a, int32_t b) {
        return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    });
    const float largest = logits[order[0]];
    double sum = 0.0;
    for (const float x : logits) {
        sum += std::exp(static_cast<double>(x - largest));
    }
    const auto norm = static_cast<float>(std::log(sum));
    for (int i = 0; i < k; i++) {
        ids[i] = order[i];
        logprobs[i] = logits[order[i]] - largest - norm;
    }
}

}  // namespace dflash
