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
#include "largest.h"
#include "logit_rows.h"

namespace {

// The candidates of random rows are those of a whole sort, however they are searched for.
void candidates_are_those_of_a_whole_sort() {
    constexpr int n_rows = 5;
    constexpr int k = 6;
    for (const int n : {33, 320, 4096, 8192}) {
        logit_rows rows(n, n_rows);
        rows.fill(n);
        for (const bool in_chunks : {false, true}) {
            logit_graph g(rows);
            dflash::draft_candidates found;
            found.build(g.nodes.get(), g.backend, g.scratch, g.logits, k, in_chunks);
            g.run({found.ids, found.logits, found.sums});
            const auto ids = g.of<int32_t>(found.ids);
            const auto values = g.of<float>(found.logits);
            const auto sums = g.of<float>(found.sums);
            for (int i = 0; i < n_rows; i++) {
                const std::vector<float> row = rows.copy_of(i);
                std::vector<int32_t> wanted(k);
                std::vector<float> logprobs(k);
                dflash::top_k_of(row, k, wanted.data(), logprobs.data());
                const std::vector<int32_t> of_row(ids.begin() + i * k, ids.begin() + (i + 1) * k);
                check::that(std::is_permutation(wanted.begin(), wanted.end(), of_row.begin()),
                            "candidates of " + std::to_string(n));
                check::that(std::abs(-std::log(sums[i]) - logprobs[0]) < 1e-4f, "sum");
                for (int j = 0; j < k; j++) {
                    check::equal(values[i * k + j], row[of_row[j]], "logit of a candidate");
                }
            }
        }
    }
}

// The peaks of chunks on a backend that can pool, and on one that cannot.
void peaks_without_pooling() {
    for (const int size : {4, 32, 128}) {
        logit_rows rows(int64_t{11} * size, 3);
        rows.fill(size);
        for (float & x : rows.values) {
            x -= 5.0f;  // mostly below 0
        }
        rows.set();
        logit_graph g(rows);
        ggml_tensor * pooled = dflash::peaks_of(g.nodes.get(), g.backend, g.logits, size);
        ggml_tensor * found = dflash::peaks_by_argmax(g.nodes.get(), g.logits, size);
        check::equal(pooled->op, GGML_OP_POOL_2D, "a CPU pools");
        g.run({pooled, found});
        check::equal(g.of<float>(found), g.of<float>(pooled), "peaks of chunks");
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

// A head that knows 64 tokens, all of which are token 0: what they are is not the point.
constexpr int n_known = 64;

void reduce(drafter_file & file) {
    file.set_zeros("d2t", GGML_TYPE_I64, {n_known});
    file.set("output.weight", GGML_TYPE_Q8_0, {shipped_pair::n_embd, n_known});
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
            check_candidates(whole, pair.n_vocab);
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
        spark.add_markov(is_reduced ? n_known : pair.n_vocab);
        drafter_file two(with_selector());
        two.add_selector();
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
    const int rank = with_markov().markov_rank;
    std::vector<float> strong(size_t{pair.n_vocab} * rank);
    std::generate(strong.begin(), strong.end(), [&] { return normal(random); });
    for (const float cap : {0.0f, 20.0f}) {
        for (const bool is_reduced : {false, true}) {
            dflash::draft_params params = with_markov();
            params.logit_cap = cap;
            drafter_file file(params);
            file.add_markov(is_reduced ? n_known : pair.n_vocab);
            file.set("markov_w1.weight", {rank, pair.n_vocab}, strong);
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
    constexpr int n_embd = shipped_pair::n_embd;
    constexpr int n_vocab = shipped_pair::n_vocab;
    const int rank = with_markov().markov_rank;
    const temporary_file path;
    const auto refused = [&](const dflash::draft_params & params, const std::string & name,
                             const std::function<void(drafter_file &)> & change) {
        drafter_file file(params);
        params.markov_rank > 0 ? file.add_markov() : file.add_selector();
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
    refused(small_params(), "blk.0.attn_conv_base", [](file &) {});
    for (const char * name :
         {"selector_predecessor.weight", "selector_successor.weight", "selector_hidden.weight",
          "blk.0.attn_conv_base", "blk.0.ffn_conv_proj.weight"}) {
        refused(with_selector(), name, [&](file & f) { f.remove(name); });
        refused(with_selector(), name, [&](file & f) { f.set(name, GGML_TYPE_F32, {16, 64}); });
    }
}

const check::tests registered{
    {"candidates are those of a whole sort", candidates_are_those_of_a_whole_sort},
    {"peaks without pooling", peaks_without_pooling},
    {"the path takes the best step from each position",
     the_path_takes_the_best_step_from_each_position},
    {"heads draft", heads_draft},
    {"guessed tokens draft the same", guessed_tokens_draft_the_same},
    {"tensors of heads that do not fit", tensors_of_heads_that_do_not_fit},
};

}  // namespace
