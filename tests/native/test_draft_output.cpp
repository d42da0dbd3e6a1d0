// The likeliest tokens as a backend finds them, against sorting whole rows.

#include <algorithm>
#include <array>
#include <cmath>
#include <random>

#include "draft_output.h"
#include "errors.h"
#include "tests.h"
#include "top_k.h"

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

std::vector<float> random_logits(int n_vocab) {
    std::mt19937 random(static_cast<uint32_t>(n_vocab));
    std::normal_distribution<float> normal(0.0f, 3.0f);
    std::vector<float> logits(static_cast<size_t>(n_vocab) * n_rows);
    std::generate(logits.begin(), logits.end(), [&] { return normal(random); });
    return logits;
}

// The output of a graph that has these logits, [n_rows, n_vocab], on the CPU.
candidates found(const std::vector<float> & logits, int top_k, selection wanted) {
    constexpr size_t n_nodes = dflash::draft_output::n_nodes + 2;
    const ggml_backend_ptr backend(
        ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    const ggml_context_ptr inputs(ggml_init({ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * input = ggml_new_tensor_2d(inputs.get(), GGML_TYPE_F32,
                                             static_cast<int64_t>(logits.size()) / n_rows, n_rows);
    const ggml_backend_buffer_ptr buffer(
        ggml_backend_alloc_ctx_tensors(inputs.get(), backend.get()));
    ggml_backend_tensor_set(input, logits.data(), 0, logits.size() * sizeof(float));

    const ggml_context_ptr nodes(
        ggml_init({ggml_tensor_overhead() * n_nodes + ggml_graph_overhead_custom(n_nodes, false),
                   nullptr, true}));
    ggml_cgraph * graph = ggml_new_graph_custom(nodes.get(), n_nodes, false);
    dflash::draft_output output;
    dflash::draft_scratch scratch(backend.get());
    output.build(nodes.get(), graph, backend.get(), scratch, ggml_scale(nodes.get(), input, 1.0f),
                 top_k, wanted);
    check::that(scratch.allocate(graph), "no memory for the graph");
    check::equal(ggml_backend_graph_compute(backend.get(), graph), GGML_STATUS_SUCCESS, "status");
    candidates out{std::vector<int32_t>(n_rows * top_k), std::vector<float>(n_rows * top_k)};
    output.read(backend.get(), out.ids.data(), out.logprobs.data());
    return out;
}

// Vocabularies that divide into chunks, and such as do not.
void candidates_equal_a_whole_sort() {
    for (const int n_vocab : {1, 2, 31, 32, 33, 64, 96, 320, 1000, 4097, 8192}) {
        const std::vector<float> logits = random_logits(n_vocab);
        for (const int top_k : {1, std::min(2, n_vocab), std::min(8, n_vocab)}) {
            for (const selection wanted : all_selections) {
                const candidates out = found(logits, top_k, wanted);
                for (int i = 0; i < n_rows; i++) {
                    const auto row = logits.begin() + static_cast<std::ptrdiff_t>(i) * n_vocab;
                    std::vector<int32_t> ids(top_k);
                    std::vector<float> logprobs(top_k);
                    dflash::top_k_of({row, row + n_vocab}, top_k, ids.data(), logprobs.data());
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
        std::vector<float> logits(static_cast<size_t>(n_vocab) * n_rows, -1.0f);
        for (int i = 0; i < n_rows; i++) {
            logits[i * n_vocab + i] = 2.0f;
            logits[i * n_vocab + n_vocab - 1 - i] = 2.0f;
        }
        const candidates out = found(logits, 1, selection::on_device);
        for (int i = 0; i < n_rows; i++) {
            check::that(out.ids[i] == i || out.ids[i] == n_vocab - 1 - i, "id");
        }
    }
}

void what_is_no_number_is_refused() {
    for (const int n_vocab : {33, 320}) {
        for (const int at : {0, n_vocab / 2, n_vocab - 1, -1}) {
            std::vector<float> logits = random_logits(n_vocab);
            const auto row = logits.end() - n_vocab;
            if (at < 0) {
                std::fill(row, logits.end(), NAN);
            } else {
                row[at] = NAN;
            }
            for (const int top_k : {1, 8}) {
                for (const selection wanted : all_selections) {
                    check::throws<dflash::backend_error>(
                        [&] { found(logits, top_k, wanted); }, "not a number",
                        "NaN at " + std::to_string(at) + " of " + std::to_string(n_vocab));
                }
            }
        }
    }
}

}  // namespace

std::vector<check::test> output_tests() {
    return {
        {"candidates equal a whole sort", candidates_equal_a_whole_sort},
        {"one of equals is found", one_of_equals_is_found},
        {"what is no number is refused", what_is_no_number_is_refused},
    };
}
