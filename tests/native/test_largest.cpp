// The best of a row, against sorting all of it.

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "check.h"
#include "largest.h"

namespace {

using candidate = std::pair<int32_t, float>;

std::vector<candidate> sorted(const std::vector<float> & logits) {
    double sum = 0.0;
    for (const float x : logits) {
        sum += std::exp(static_cast<double>(x));
    }
    std::vector<candidate> all;
    for (size_t i = 0; i < logits.size(); i++) {
        all.emplace_back(static_cast<int32_t>(i), static_cast<float>(logits[i] - std::log(sum)));
    }
    std::stable_sort(all.begin(), all.end(), [&](const candidate & a, const candidate & b) {
        return logits[a.first] > logits[b.first];
    });
    return all;
}

std::vector<float> row(std::mt19937 & random, int n, int n_values) {
    std::uniform_int_distribution<int> value(0, n_values - 1);
    std::vector<float> logits(n);
    for (float & x : logits) {
        const int v = value(random);
        x = v == 0 ? -INFINITY : 8.0f * static_cast<float>(v) / static_cast<float>(n_values);
    }
    logits[n / 2] = 3.0f;  // a row without a finite logit has no log-probabilities
    return logits;
}

void the_best_equal_a_whole_sort() {
    std::mt19937 random(5);
    for (const int n_values : {2, 5, 1000}) {  // few values: many ties
        for (const int n : {1, 2, 17, 300}) {
            const std::vector<float> logits = row(random, n, n_values);
            const std::vector<candidate> expected = sorted(logits);
            for (const int k : {1, (n + 1) / 2, n}) {
                std::vector<int32_t> ids(k);
                std::vector<float> logprobs(k);
                dflash::top_k_of(logits, k, ids.data(), logprobs.data());
                for (int i = 0; i < k; i++) {
                    check::equal(ids[i], expected[i].first, "id");
                    const float difference = std::abs(logprobs[i] - expected[i].second);
                    check::that(logprobs[i] == expected[i].second || difference < 1e-4f,
                                "log-probability");
                }
            }
        }
    }
}

void candidates_are_put_in_order() {
    std::mt19937 random(6);
    for (const int n : {0, 1, 2, 40}) {
        std::vector<candidate> expected;
        for (int i = 0; i < n; i++) {
            expected.emplace_back(i, -static_cast<float>(i / 3));  // in threes, equal
        }
        std::vector<candidate> shuffled = expected;
        std::shuffle(shuffled.begin(), shuffled.end(), random);
        std::vector<int32_t> ids;
        std::vector<float> logprobs;
        for (const auto & [id, logprob] : shuffled) {
            ids.push_back(id);
            logprobs.push_back(logprob);
        }
        dflash::sort_best_first(ids.data(), logprobs.data(), n);
        for (int i = 0; i < n; i++) {
            check::equal(candidate(ids[i], logprobs[i]), expected[i], "order");
        }
    }
}

const check::tests registered{
    {"the best equal a whole sort", the_best_equal_a_whole_sort},
    {"candidates are put in order", candidates_are_put_in_order},
};

}  // namespace
