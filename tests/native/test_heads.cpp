// Heads whose positions depend on one another: the search for candidates, the path through them,
// and drafters with such heads.

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "chunks.h"
#include "draft_candidates.h"
#include "draft_lattice.h"
#include "drafter_file.h"
#include "drafts.h"
#include "errors.h"
#include "tests.h"
#include "top_k.h"

namespace {

constexpr int n_embd = 512;
constexpr int n_vocab = 8192;
constexpr int rank = 32;

// The candidates of random rows are those of a whole sort, however they are searched for.
void candidates_are_those_of_a_whole_sort() {
    constexpr int n_rows = 5;
    for (const int n : {33, 320, 4096, 8192}) {
        for (const bool in_chunks : {false, true}) {
            constexpr int k = 6;
            constexpr size_t n_nodes = dflash::draft_candidates::n_nodes + 8;
            std::mt19937 random(static_cast<uint32_t>(n));
            std::normal_distribution<float> normal(0.0f, 3.0f);
            std::vector<float> logits(static_cast<size_t>(n) * n_rows);
            std::generate(logits.begin(), logits.end(), [&] { return normal(random); });

            const ggml_backend_ptr backend(
                ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
            const ggml_context_ptr inputs(ggml_init({ggml_tensor_overhead(), nullptr, true}));
            ggml_tensor * input = ggml_new_tensor_2d(inputs.get(), GGML_TYPE_F32, n, n_rows);
            const ggml_backend_buffer_ptr buffer(
                ggml_backend_alloc_ctx_tensors(inputs.get(), backend.get()));
            ggml_backend_tensor_set(input, logits.data(), 0, logits.size() * sizeof(float));
            const ggml_context_ptr nodes(ggml_init(
                {ggml_tensor_overhead() * n_nodes + ggml_graph_overhead_custom(n_nodes, false),
                 nullptr, true}));
            ggml_cgraph * graph = ggml_new_graph_custom(nodes.get(), n_nodes, false);
            dflash::draft_scratch scratch(backend.get());
            dflash::draft_candidates found;
            found.build(nodes.get(), backend.get(), scratch, ggml_scale(nodes.get(), input, 1.0f),
                        k, in_chunks);
            for (ggml_tensor * result : {found.ids, found.logits, found.sums}) {
                ggml_set_output(result);
                ggml_build_forward_expand(graph, result);
            }
            check::that(scratch.allocate(graph), "no memory for the graph");
            check::equal(ggml_backend_graph_compute(backend.get(), graph), GGML_STATUS_SUCCESS,
                         "status");
            std::vector<int32_t> ids(k * n_rows);
            std::vector<float> values(k * n_rows);
            std::vector<float> sums(n_rows);
            ggml_backend_tensor_get(found.ids, ids.data(), 0, ggml_nbytes(found.ids));
            ggml_backend_tensor_get(found.logits, values.data(), 0, ggml_nbytes(found.logits));
            ggml_backend_tensor_get(found.sums, sums.data(), 0, ggml_nbytes(found.sums));
            for (int i = 0; i < n_rows; i++) {
                const auto row = logits.begin() + static_cast<std::ptrdiff_t>(i) * n;
                std::vector<int32_t> wanted(k);
                std::vector<float> logprobs(k);
                dflash::top_k_of({row, row + n}, k, wanted.data(), logprobs.data());
                const std::vector<int32_t> of_row(ids.begin() + i * k, ids.begin() + (i + 1) * k);
                check::that(std::is_permutation(wanted.begin(), wanted.end(), of_row.begin()),
                            "candidates of " + std::to_string(n));
                const float peak = row[wanted[0]];
                check::that(std::abs(-std::log(sums[i]) - logprobs[0]) < 1e-4f, "sum");
                for (int j = 0; j < k; j++) {
                    check::equal(values[i * k + j], row[of_row[j]], "logit of a candidate");
                    check::that(values[i * k + j] <= peak, "the largest");
                }
            }
        }
    }
}

// The peaks of chunks on a backend that can pool, and on one that cannot.
void peaks_without_pooling() {
    constexpr int n_rows = 3;
    const ggml_backend_ptr backend(
        ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    for (const int size : {4, 32, 128}) {
        const int64_t n_vocab = int64_t{11} * size;
        constexpr size_t n_nodes = 32;
        const ggml_context_ptr nodes(ggml_init(
            {ggml_tensor_overhead() * n_nodes + ggml_graph_overhead_custom(n_nodes, false), nullptr,
             true}));
        ggml_context * c = nodes.get();
        ggml_tensor * logits = ggml_new_tensor_2d(c, GGML_TYPE_F32, n_vocab, n_rows);
        ggml_tensor * pooled = dflash::peaks_of(c, backend.get(), logits, size);
        ggml_tensor * found = dflash::peaks_by_argmax(c, logits, size);
        check::equal(pooled->op, GGML_OP_POOL_2D, "a CPU pools");
        ggml_cgraph * graph = ggml_new_graph_custom(c, n_nodes, false);
        ggml_build_forward_expand(graph, pooled);
        ggml_build_forward_expand(graph, found);
        const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(c, backend.get()));
        std::mt19937 random(static_cast<uint32_t>(size));
        std::normal_distribution<float> normal(-5.0f, 3.0f);
        std::vector<float> values(n_vocab * n_rows);
        std::generate(values.begin(), values.end(), [&] { return normal(random); });
        ggml_backend_tensor_set(logits, values.data(), 0, ggml_nbytes(logits));
        check::equal(ggml_backend_graph_compute(backend.get(), graph), GGML_STATUS_SUCCESS, "run");
        std::vector<float> expected(ggml_nelements(pooled));
        std::vector<float> peaks(ggml_nelements(found));
        ggml_backend_tensor_get(pooled, expected.data(), 0, ggml_nbytes(pooled));
        ggml_backend_tensor_get(found, peaks.data(), 0, ggml_nbytes(found));
        check::equal(peaks, expected, "peaks of chunks");
        check::equal(found->ne[0], pooled->ne[0], "chunks of a row");
    }
}

void the_path_takes_the_best_step_from_each_position() {
    dflash::draft_lattice lattice(2, 2);
    lattice.ids = {11, 12, 21, 22};
    for (int b = 0; b < 2; b++) {
        for (int a = 0; a < 2; a++) {
            lattice.score(0, a, b) = static_cast<float>(b);  // the anchor likes 12
        }
    }
    lattice.score(1, 0, 0) = 5.0f;  // 11, then 21, which the path does not come by
    lattice.score(1, 1, 1) = std::log(3.0f);
    std::vector<int32_t> ids(4);
    std::vector<float> logprobs(4);
    std::vector<float> steps(8);
    dflash::follow(lattice, 7, 2, {ids.data(), logprobs.data(), steps.data()});
    check::equal(ids, {12, 11, 22, 21}, "best first");
    const auto near = [](float found, float expected) {
        check::that(std::abs(found - expected) < 1e-5f, "log-probability");
    };
    near(logprobs[0], -std::log1p(std::exp(-1.0f)));
    near(logprobs[2], std::log(0.75f));
    near(steps[4], std::log(0.75f));               // 22 after 12
    near(steps[7], -std::log1p(std::exp(-5.0f)));  // 21 after 11
    lattice.score(1, 0, 1) = NAN;
    check::throws<dflash::backend_error>(
        [&] { dflash::follow(lattice, 7, 2, {ids.data(), logprobs.data(), steps.data()}); },
        "not a number", "a score that is no number");
}

dflash::draft_params with_markov() {
    dflash::draft_params params = small_params(n_embd);
    params.markov_rank = rank;
    params.from_anchor = true;
    return params;
}

dflash::draft_params with_selector() {
    dflash::draft_params params = small_params(n_embd);
    params.selector = {rank, 5, 3, 64};
    return params;
}

void add_markov(drafter_file & file, int n_rows) {
    file.set("markov_w1.weight", GGML_TYPE_Q8_0, {rank, n_vocab});
    file.set("markov_w2.weight", GGML_TYPE_F16, {rank, n_rows});
    file.set("conf_proj.weight", GGML_TYPE_F16, {n_embd + rank, 1});
    file.set("conf_proj.bias", GGML_TYPE_F32, {1});
}

void add_selector(drafter_file & file) {
    file.set("selector_predecessor.weight", GGML_TYPE_Q8_0, {rank, n_vocab});
    file.set("selector_successor.weight", GGML_TYPE_F16, {rank, n_vocab});
    file.set("selector_hidden.weight", GGML_TYPE_F32, {n_embd, rank});
    for (const char * part : {"attn", "ffn"}) {
        const std::string name = std::string("blk.0.") + part + "_conv_";
        file.set(name + "base", GGML_TYPE_F32, {n_embd, 3, 2});
        file.set(name + "proj.weight", GGML_TYPE_Q8_0, {n_embd, 2 * 3 * (n_embd / 64)});
    }
}

// A head that knows 64 tokens, all of which are token 0: what they are is not the point.
void reduce(drafter_file & file) {
    file.set_zeros("d2t", GGML_TYPE_I64, {64});
    file.set("output.weight", GGML_TYPE_Q8_0, {n_embd, 64});
}

void check_drafts(const shipped_pair & pair, const std::string & path,
                  const dflash::draft_params & params, bool is_reduced) {
    for (const int top_k : {1, 4}) {
        dflash::fused_drafter d(pair.model(), nullptr, path, params, 3, 256, top_k, 1);
        check::equal(d.top_k(), top_k, "candidates");
        const int n = params.n_drafts();
        const std::vector<float> row(d.params().n_features(), 0.5f);
        const drafts whole = draft(d, {{2, {1, row.data()}, 7}, {0, {}, 9}}, n);
        if (is_reduced) {
            check::that(std::count(whole.ids.begin(), whole.ids.end(), 0) ==
                            static_cast<std::ptrdiff_t>(whole.ids.size()),
                        "a token that the head does not know");
        } else {
            check_candidates(whole, n_vocab);
        }
        for (int n_draft = 1; n_draft < n; n_draft++) {
            const drafts part = draft(d, {{0, {}, 9}}, n_draft);
            const drafts first = whole.of(1, 2);
            check::that(std::equal(part.ids.begin(), part.ids.end(), first.ids.begin()),
                        "fewer drafts are the first ones");
        }
    }
}

void heads_draft(const shipped_pair & pair) {
    const temporary_file path;
    for (const bool is_reduced : {false, true}) {
        drafter_file spark(with_markov());
        add_markov(spark, is_reduced ? 64 : n_vocab);
        drafter_file two(with_selector());
        add_selector(two);
        if (is_reduced) {
            reduce(spark);
            reduce(two);
        }
        spark.write(path.path());
        check_drafts(pair, path.path(), with_markov(), is_reduced);
        two.write(path.path());
        check_drafts(pair, path.path(), with_selector(), is_reduced);
    }
}

// On a GPU the tokens before are guessed, in rounds. After as many rounds as there are positions
// the drafts are those of the exact path, and after fewer the first ones are.
void guessed_tokens_draft_the_same(const shipped_pair & pair) {
    const temporary_file path;
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0.0f, 6.0f);  // so that much depends on them
    std::vector<float> strong(size_t{rank} * n_vocab);
    std::generate(strong.begin(), strong.end(), [&] { return normal(random); });
    for (const float cap : {0.0f, 20.0f}) {
        for (const bool is_reduced : {false, true}) {
            dflash::draft_params params = with_markov();
            params.logit_cap = cap;
            drafter_file file(params);
            add_markov(file, is_reduced ? 64 : n_vocab);
            file.set("markov_w1.weight", {rank, n_vocab}, strong);
            if (is_reduced) {
                reduce(file);
            }
            file.write(path.path());
            const std::vector<float> row(params.n_features(), 0.5f);
            const int n = params.n_drafts();
            for (const int top_k : {1, 4}) {
                const auto found = [&](int n_rounds) {
                    dflash::draft_capabilities allowed;
                    allowed.n_rounds = n_rounds;
                    dflash::fused_drafter d(pair.model(), nullptr, path.path(), params, 2, 256,
                                            top_k, 1, allowed);
                    return draft(d, {{0, {1, row.data()}, 7}, {1, {}, 9}}, n);
                };
                const drafts exact = found(0);
                check_close(found(n), exact, 5e-3f, "a round for each position");
                check::that(is_reduced || found(1).ids != exact.ids, "the token before matters");
                const drafts first = found(2);
                for (int s = 0; s < 2; s++) {
                    const auto at = exact.ids.begin() + std::ptrdiff_t{s} * n * top_k;
                    check::that(std::equal(at, at + 2 * top_k,
                                           first.ids.begin() + std::ptrdiff_t{s} * n * top_k),
                                "two rounds, the first two positions");
                }
            }
        }
    }
}

void tensors_of_heads_that_do_not_fit(const shipped_pair & pair) {
    const temporary_file path;
    const auto refused = [&](const dflash::draft_params & params, const std::string & name,
                             const std::function<void(drafter_file &)> & change) {
        drafter_file file(params);
        params.markov_rank > 0 ? add_markov(file, n_vocab) : add_selector(file);
        change(file);
        file.write(path.path());
        check::throws<dflash::file_error>([&] { pair.open_drafter(path.path(), params); }, name,
                                          name);
    };
    using file = drafter_file;
    for (const char * name : {"markov_w1.weight", "markov_w2.weight"}) {
        refused(with_markov(), name, [&](file & f) { f.remove(name); });
        refused(with_markov(), name, [&](file & f) { f.set(name, GGML_TYPE_F32, {16, n_vocab}); });
        refused(with_markov(), name, [&](file & f) { f.set(name, GGML_TYPE_F32, {rank, 64}); });
    }
    refused(with_markov(), "conf_proj.weight",
            [](file & f) { f.set("conf_proj.weight", GGML_TYPE_F32, {n_embd, 1}); });
    refused(with_markov(), "d2t", [](file & f) { f.set("d2t", GGML_TYPE_F32, {64}); });
    refused(with_markov(), "output.weight",
            [](file & f) { f.set_zeros("d2t", GGML_TYPE_I64, {64}); });
    refused(small_params(n_embd), "blk.0.attn_conv_base", [](file &) {});
    for (const char * name :
         {"selector_predecessor.weight", "selector_successor.weight", "selector_hidden.weight",
          "blk.0.attn_conv_base", "blk.0.ffn_conv_proj.weight"}) {
        refused(with_selector(), name, [&](file & f) { f.remove(name); });
        refused(with_selector(), name, [&](file & f) { f.set(name, GGML_TYPE_F32, {16, 64}); });
    }
}

}  // namespace

std::vector<check::test> head_tests(const shipped_pair & pair) {
    return {
        {"candidates are those of a whole sort", candidates_are_those_of_a_whole_sort},
        {"peaks without pooling", peaks_without_pooling},
        {"the path takes the best step from each position",
         the_path_takes_the_best_step_from_each_position},
        {"heads draft", [&] { heads_draft(pair); }},
        {"guessed tokens draft the same", [&] { guessed_tokens_draft_the_same(pair); }},
        {"tensors of heads that do not fit", [&] { tensors_of_heads_that_do_not_fit(pair); }},
    };
}
