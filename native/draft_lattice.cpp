#include "draft_lattice.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "errors.h"

namespace dflash {

namespace {

float log_sum_exp(const float * values, int n) {
    const float peak = *std::max_element(values, values + n);
    if (!std::isfinite(peak)) {
        refuse_numbers();
    }
    double sum = 0.0;
    for (int i = 0; i < n; i++) {
        sum += std::exp(static_cast<double>(values[i] - peak));
    }
    return peak + static_cast<float>(std::log(sum));
}

}  // namespace

void follow(const draft_lattice & lattice, int32_t anchor, int k, const draft_rows & out,
            const weighing & weigh) {
    const int all = lattice.k;
    check_numbers(lattice.scores.data(), static_cast<int64_t>(lattice.scores.size()));
    std::vector<int> before(k, 0);  // candidates of the position before, best first
    std::vector<int> order(all);
    std::vector<float> row(k);
    for (int i = 0; i < lattice.n; i++) {
        const int32_t * ids = lattice.ids.data() + static_cast<size_t>(i) * all;
        const auto scores_after = [&](int candidate) {
            return lattice.scores.data() + (static_cast<size_t>(i) * all + candidate) * all;
        };
        const float * best = scores_after(before[0]);
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](int a, int b) {
            return best[a] != best[b] ? best[a] > best[b] : ids[a] < ids[b];
        });
        const int n_rows = out.steps != nullptr ? k : 1;
        for (int r = 0; r < n_rows; r++) {
            const float * scores = scores_after(before[r]);
            float norm = log_sum_exp(scores, all);
            if (!lattice.log_mass.empty()) {
                norm -= lattice.log_mass[i];
            }
            for (int j = 0; j < k; j++) {
                row[j] = scores[order[j]] - norm;
            }
            if (weigh) {
                weigh(i, i > 0 ? out.ids[static_cast<size_t>(i - 1) * k + r] : anchor, row.data(),
                      k);
            }
            if (r == 0) {
                std::copy(row.begin(), row.end(), out.logprobs + static_cast<size_t>(i) * k);
            }
            if (out.steps != nullptr) {
                std::copy(row.begin(), row.end(), out.steps + (static_cast<size_t>(i) * k + r) * k);
            }
        }
        for (int j = 0; j < k; j++) {
            out.ids[static_cast<size_t>(i) * k + j] = ids[order[j]];
            before[j] = order[j];
        }
    }
}

}  // namespace dflash
