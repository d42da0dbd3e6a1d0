// The candidates of rows as a graph finds them, against sorting whole rows.

#include <algorithm>
#include <cmath>

#include "candidate_search.h"
#include "largest.h"
#include "logit_rows.h"

using dflash::candidate_search;

namespace {

constexpr int n_vocab = 4096;
constexpr int n_rows = 5;

void check_row(const candidate_search & search, logit_rows & rows, int row, int k) {
    const std::string what = "best " + std::to_string(k) + " of row " + std::to_string(row);
    check::that(search.has(row, k), what + ": not searched");
    std::vector<int32_t> ids(k);
    std::vector<int32_t> expected_ids(k);
    std::vector<float> logits(k);
    std::vector<float> expected(k);
    const float * all = rows.row(row);
    check::that(search.read(row, k, ids.data(), logits.data()), what + ": finite");
    check::that(dflash::largest_of(all, n_vocab, k, expected_ids.data(), expected.data()), what);
    check::equal(logits, expected, what);
    for (int i = 0; i < k; i++) {
        check::equal(all[ids[i]], logits[i], what + ": id");
        check::that(i == 0 || logits[i] < logits[i - 1] || ids[i] > ids[i - 1], what + ": order");
    }
    double sum = 0.0;
    for (int i = 0; i < n_vocab; i++) {
        sum += std::exp(double{all[i]} - expected[0]);
    }
    check::that(std::abs(search.log_sum(row) - std::log(sum) - expected[0]) < 1e-5, what + ": sum");
}

void any_rows_are_searched_again_and_again() {
    logit_rows rows(n_vocab, n_rows);
    candidate_search search;
    check::that(!search.has(0, 1), "nothing is there at first");
    for (unsigned seed = 0; seed < 12; seed++) {
        rows.fill(seed, seed % 3 == 0 ? 0.25f : 0.0f);
        const int first = static_cast<int>(seed) % 3;
        const int n = n_rows - first - static_cast<int>(seed) % 2;
        const int k = seed % 2 == 0 ? 41 : 64;
        check::that(search.find(*rows.tensor, first, n, k), "the CPU can");
        for (int row = first; row < first + n; row++) {
            for (const int fewer : {1, 7, k}) {
                check_row(search, rows, row, fewer);
            }
        }
        check::that(!search.has(first - 1, 1) && !search.has(first + n, 1), "other rows");
        check::that(!search.has(first, k + 1), "more candidates");
        search.forget();
        check::that(!search.has(first, 1), "forgotten");
    }
}

void impossible_tokens_are_the_last() {
    logit_rows rows(n_vocab, n_rows);
    rows.fill(1);
    std::fill(rows.row(2), rows.row(3), -INFINITY);
    rows.row(2)[4000] = 1.0f;
    rows.row(2)[17] = -2.0f;
    rows.set();
    candidate_search search;
    check::that(search.find(*rows.tensor, 0, n_rows, 8), "the CPU can");
    std::vector<int32_t> ids(8);
    std::vector<float> logits(8);
    check::that(search.read(2, 8, ids.data(), logits.data()), "finite");
    check::that(ids[0] == 4000 && ids[1] == 17, "ids");
    check::that(logits[0] == 1.0f && logits[1] == -2.0f && logits[2] == -INFINITY, "logits");
    check_row(search, rows, 1, 8);
}

void rows_that_are_not_numbers_are_told() {
    for (const float bad : {NAN, INFINITY}) {
        logit_rows rows(n_vocab, n_rows);
        rows.fill(1);
        rows.row(1)[300] = bad;
        std::fill(rows.row(3), rows.row(4), -INFINITY);
        rows.set();
        candidate_search search;
        check::that(search.find(*rows.tensor, 0, n_rows, 8), "the CPU can");
        std::vector<int32_t> ids(8);
        std::vector<float> logits(8);
        for (int row = 0; row < n_rows; row++) {
            check::equal(search.read(row, 8, ids.data(), logits.data()), row != 1 && row != 3,
                         "row " + std::to_string(row));
        }
    }
}

void too_many_are_refused() {
    logit_rows rows(n_vocab, n_rows);
    rows.fill(1);
    candidate_search search;
    check::that(!search.find(*rows.tensor, 0, n_rows, 65), "more than half of the chunks");
    check::that(!search.has(0, 1), "nothing is found");
    check::that(search.find(*rows.tensor, 0, n_rows, 64), "but it goes on");
}

const check::tests registered{
    {"any rows are searched, again and again", any_rows_are_searched_again_and_again},
    {"impossible tokens are the last", impossible_tokens_are_the_last},
    {"rows that are not numbers are told", rows_that_are_not_numbers_are_told},
    {"too many candidates are refused", too_many_are_refused},
};

}  // namespace
