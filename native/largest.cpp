#include "largest.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <utility>

namespace dflash {

namespace {

constexpr int n_lanes = 16;
constexpr int largest_chunk = 128;

// Of n floats; NaN where one is among them. In lanes, which compilers turn into vectors.
float peak_of(const float * row, int n) {
    std::array<float, n_lanes> peaks;
    std::array<int, n_lanes> odd{};
    peaks.fill(-INFINITY);
    int i = 0;
    for (; i + n_lanes <= n; i += n_lanes) {
        for (int lane = 0; lane < n_lanes; lane++) {
            const float x = row[i + lane];
            peaks[lane] = x > peaks[lane] ? x : peaks[lane];
            odd[lane] |= x != x ? 1 : 0;
        }
    }
    for (; i < n; i++) {
        peaks[0] = row[i] > peaks[0] ? row[i] : peaks[0];
        odd[0] |= row[i] != row[i] ? 1 : 0;
    }
    if (std::find(odd.begin(), odd.end(), 1) != odd.end()) {
        return NAN;
    }
    return *std::max_element(peaks.begin(), peaks.end());
}

}  // namespace

int32_t largest_of(const float * row, int n) {
    const float peak = peak_of(row, n);
    return std::isfinite(peak) ? static_cast<int32_t>(std::find(row, row + n, peak) - row) : -1;
}

bool largest_of(const float * row, int n, int k, int32_t * indices, float * values) {
    // Several chunks for each that is kept, so that few are searched; each of whole lanes.
    const int wanted = n / (4 * k) / n_lanes * n_lanes;
    const int chunk = std::clamp(wanted, n_lanes, largest_chunk);
    std::vector<float> peaks;
    for (int begin = 0; begin < n; begin += chunk) {
        peaks.push_back(peak_of(row + begin, std::min(chunk, n - begin)));
        if (std::isnan(peaks.back())) {
            return false;
        }
    }
    if (!std::isfinite(*std::max_element(peaks.begin(), peaks.end()))) {
        return false;
    }
    // None of the k largest is less than the k-th largest peak.
    float least = -INFINITY;
    if (k <= static_cast<int>(peaks.size())) {
        std::vector<float> ranked = peaks;
        std::nth_element(ranked.begin(), ranked.begin() + (k - 1), ranked.end(),
                         std::greater<float>());
        least = ranked[k - 1];
    }
    std::vector<int32_t> found;
    for (size_t i = 0; i < peaks.size(); i++) {
        if (peaks[i] < least) {
            continue;
        }
        const int begin = static_cast<int>(i) * chunk;
        const int end = std::min(begin + chunk, n);
        for (int j = begin; j < end; j++) {
            if (row[j] >= least) {
                found.push_back(j);
            }
        }
    }
    std::partial_sort(found.begin(), found.begin() + k, found.end(), [&](int32_t a, int32_t b) {
        return row[a] != row[b] ? row[a] > row[b] : a < b;
    });
    for (int i = 0; i < k; i++) {
        indices[i] = found[i];
        values[i] = row[found[i]];
    }
    return true;
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

}  // namespace dflash
