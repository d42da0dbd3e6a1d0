// The likeliest tokens as a backend finds them, against sorting whole rows.

#include <algorithm>
#include <array>
#include <cmath>

#include "draft_output.h"
#include "errors.h"
#include "largest.h"
#include "logit_rows.h"

using dflash::selection;

namespace {

constexpr int n_rows = 5;
constexpr float noise = 1e-5f;
constexpr std::array all_selections = {selection::on_device, selection::among_few,
                                       selection::on_host};

struct candidates {
    std::vector<int32_t> ids;
    std::vector<float> logprobs;
};

logit_rows random_rows(int n_vocab) {
    logit_rows rows(n_vocab, n_rows);
    rows.fill(n_vocab);
    return rows;
}

// The output of a graph that has these logits.
candidates found(const logit_rows & rows, int top_k, selection wanted) {
    logit_graph g(rows);
    dflash::draft_output output;
    output.build(g.nodes.get(), g.graph, g.backend, g.scratch, g.logits, top_k, wanted);
    g.run({});
    candidates out{std::vector<int32_t>(n_rows * top_k), std::vector<float>(n_rows * top_k)};
    output.read(g.backend, 1, out.ids.data(), out.logprobs.data());
    return out;
}

// Vocabularies that divide into chunks, and such as do not.
void candidates_equal_a_whole_sort() {
    for (const int n_vocab : {1, 2, 31, 32, 33, 64, 96, 320, 1000, 4097, 8192}) {
        logit_rows rows = random_rows(n_vocab);
        for (const int top_k : {1, std::min(2, n_vocab), std::min(8, n_vocab)}) {
            for (const selection wanted : all_selections) {
                const candidates out = found(rows, top_k, wanted);
                for (int i = 0; i < n_rows; i++) {
                    std::vector<int32_t> ids(top_k);
                    std::vector<float> logprobs(top_k);
                    dflash::top_k_of(rows.copy_of(i), top_k, ids.data(), logprobs.data());
                    const std::string what = "best " + std::to_string(top_k) + " of " +
                                             std::to_string(n_vocab) + ", row " + std::to_string(i);
                    const auto of_row = static_cast<std::ptrdiff_t>(i) * top_k;
                    check::that(std::equal(ids.begin(), ids.end(), out.ids.begin() + of_row),
                                what + ": ids");
                    for (int k = 0; k < top_k; k++) {
                        check::that(std::abs(out.logprobs[of_row + k] - logprobs[k]) < noise,
                                    what + ": log-probabilities");
                    }
                }
            }
        }
    }
}

void one_of_equals_is_found() {
    for (const int n_vocab : {33, 320}) {
        logit_rows rows(n_vocab, n_rows);
        for (int i = 0; i < n_rows; i++) {
            rows.row(i)[i] = 3.0f;
            rows.row(i)[n_vocab - 1 - i] = 3.0f;
        }
        rows.set();
        const candidates out = found(rows, 1, selection::on_device);
        for (int i = 0; i < n_rows; i++) {
            check::that(out.ids[i] == i || out.ids[i] == n_vocab - 1 - i, "id");
        }
    }
}

void what_is_no_number_is_refused() {
    for (const int n_vocab : {33, 320}) {
        for (const int at : {0, n_vocab / 2, n_vocab - 1, -1}) {
            logit_rows rows = random_rows(n_vocab);
            float * last = rows.row(n_rows - 1);
            if (at < 0) {
                std::fill_n(last, n_vocab, NAN);
            } else {
                last[at] = NAN;
            }
            rows.set();
            for (const int top_k : {1, 8}) {
                for (const selection wanted : all_selections) {
                    check::throws<dflash::backend_error>(
                        [&] { found(rows, top_k, wanted); }, "not a number",
                        "NaN at " + std::to_string(at) + " of " + std::to_string(n_vocab));
                }
            }
        }
    }
}

const check::tests registered{
    {"candidates equal a whole sort", candidates_equal_a_whole_sort},
    {"one of equals is found", one_of_equals_is_found},
    {"what is no number is refused", what_is_no_number_is_refused},
};

}  // namespace
