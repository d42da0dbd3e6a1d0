// The native drafter on the shipped pair: injection, drafts, roll-back, growth, limits.

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "drafter_file.h"
#include "drafts.h"
#include "errors.h"
#include "fused_drafter.h"
#include "shipped_pair.h"

using dflash::draft_request;
using dflash::fused_drafter;

namespace {

// How far apart log-probabilities may lie beside `q8_noise`: attention rounds queries and weights
// to halves here or there; floats do not.
constexpr float attention_noise = 5e-3f;
constexpr float f32_noise = 1e-4f;

void drafts_are_candidates(const shipped_pair & pair) {
    const auto d = pair.open_drafter();
    check_candidates(draft_after(pair, *d, 0, 40, 0), d->n_vocab());
    check::equal(d->length(0), 40, "length");
    check_candidates(draft_after(pair, *d, 0, 0, 40), d->n_vocab());  // no new rows
}

void the_first_position_may_draft(const shipped_pair & pair) {
    const auto d = pair.open_drafter();
    check_candidates(draft(*d, {{0, {}, 5}}, 3), d->n_vocab());
    check::equal(d->length(0), 0, "length");
}

void the_same_inputs_give_the_same_drafts(const shipped_pair & pair) {
    const auto d = pair.open_drafter();
    inject(pair, *d, 0, 40);
    const drafts first = draft_after(pair, *d, 0, 3, 40);
    d->truncate(0, 40);
    check::equal(draft_after(pair, *d, 0, 3, 40), first, "after a roll-back");
    const auto other = pair.open_drafter();
    inject(pair, *other, 0, 40);
    check::equal(draft_after(pair, *other, 0, 3, 40), first, "with another drafter");
}

void rows_may_come_in_any_portions(const shipped_pair & pair) {
    const auto whole = pair.open_drafter();
    inject(pair, *whole, 0, 600);  // more than one graph takes
    const drafts expected = draft_after(pair, *whole, 0, 0, 600);
    const auto parts = pair.open_drafter();
    int done = 0;
    for (const int n : {1, 3, 4, 5, 64, 100}) {
        inject(pair, *parts, 0, n, done);
        done += n;
    }
    // More rows than are fused with a block.
    check_close(draft_after(pair, *parts, 0, 600 - done, done), expected, q8_noise, "in portions");
    check::equal(parts->length(0), 600, "length");
}

void sequences_do_not_see_each_other(const shipped_pair & pair) {
    const std::vector<int> lengths = {70, 9, 300};
    const std::vector<int> n_rows = {1, 6, 0};
    const auto together = pair.open_drafter(3);
    std::vector<std::vector<float>> rows;
    std::vector<draft_request> requests;
    for (int seq = 2; seq >= 0; seq--) {
        inject(pair, *together, seq, lengths[seq], 5 * seq);
    }
    for (const int seq : {2, 0, 1}) {
        rows.push_back(pair.features(n_rows[seq], 11 * seq));
        requests.push_back({seq, {n_rows[seq], rows.back().data()}, 100 + seq});
    }
    const drafts all = draft(*together, requests, 7);
    for (size_t i = 0; i < requests.size(); i++) {
        draft_request alone = requests[i];
        const int seq = alone.seq;
        const auto d = pair.open_drafter(1);
        inject(pair, *d, 0, lengths[seq], 5 * seq);
        alone.seq = 0;
        check_close(all.of(static_cast<int>(i), 3), draft(*d, {alone}, 7), q8_noise,
                    "sequence " + std::to_string(seq));
        check::equal(together->length(seq), lengths[seq] + n_rows[seq], "length");
    }
}

void a_sequence_drafts_while_others_rest(const shipped_pair & pair) {
    const auto d = pair.open_drafter(3);
    for (int seq = 0; seq < 3; seq++) {
        inject(pair, *d, seq, 30 + 30 * seq);
    }
    const drafts before = draft_after(pair, *d, 0, 0, 30);
    const auto alone = pair.open_drafter(1);
    inject(pair, *alone, 0, 90);
    check_close(draft_after(pair, *d, 2, 2, 90), draft_after(pair, *alone, 0, 2, 90), q8_noise,
                "the last sequence");
    check_close(draft_after(pair, *d, 0, 0, 30), before, q8_noise, "the first, which rested");
    check::equal(d->length(1), 60, "length of the one between");
}

void copies_are_of_their_own(const shipped_pair & pair) {
    const auto d = pair.open_drafter(2);
    d->copy(0, 1, 0);  // before there is a cache
    inject(pair, *d, 0, 50);
    inject(pair, *d, 1, 80, 9);
    d->copy(0, 1, 40);
    check::equal(d->length(1), 40, "length");
    d->truncate(0, 0);
    inject(pair, *d, 0, 60, 17);  // over the rows that were copied
    const auto fresh = pair.open_drafter(1);
    inject(pair, *fresh, 0, 40);
    check_close(draft_after(pair, *d, 1, 1, 40), draft_after(pair, *fresh, 0, 1, 40), q8_noise,
                "the copy");
    d->copy(1, 1, 10);
    check::equal(d->length(1), 10, "a copy to itself");
}

void the_cache_grows_up_to_the_context(const shipped_pair & pair) {
    constexpr int n_ctx = 3000;
    const auto d = pair.open_drafter(2, n_ctx);
    check::equal(d->n_cache_bytes(), size_t{0}, "memory before the first row");
    std::set<size_t> sizes;
    for (int done = 0; done < n_ctx; done += 500) {
        inject(pair, *d, 0, 500, done);
        inject(pair, *d, 1, 250, done);
        check_candidates(draft_after(pair, *d, 0, 0, done + 500), d->n_vocab());
        sizes.insert(d->n_cache_bytes());
    }
    check::that(sizes.size() >= 3, "the cache never grew");
    const drafts last = draft_after(pair, *d, 0, 0, n_ctx);
    const auto whole = pair.open_drafter(1, n_ctx);
    inject(pair, *whole, 0, n_ctx);
    check_close(last, draft_after(pair, *whole, 0, 0, n_ctx), q8_noise, "after growing");

    const std::vector<float> row = pair.features(1);
    check::throws<dflash::context_full_error>([&] { d->inject(0, {1, row.data()}); }, "3001",
                                              "a row too many");
    check::throws<dflash::context_full_error>(
        [&] { draft(*d, {{1, {1, row.data()}, 5}, {0, {1, row.data()}, 5}}, 3); }, "3001",
        "a draft with a row too many");
    check::equal(d->length(0), n_ctx, "length of the full sequence");
    check::equal(d->length(1), n_ctx / 2, "length of the other");
    check::equal(draft_after(pair, *d, 0, 0, n_ctx), last, "after the errors");
}

void graphs_come_and_go(const shipped_pair & pair) {
    const auto d = pair.open_drafter();
    inject(pair, *d, 0, 40);
    const auto all = [&] {
        std::vector<drafts> out;
        for (int n_draft = 1; n_draft < d->params().block_size; n_draft++) {
            out.push_back(draft(*d, {{0, {}, 7}}, n_draft));
        }
        return out;
    };
    check::equal(all(), all(), "more graphs than are kept");
}

void bad_arguments_are_refused(const shipped_pair & pair) {
    const auto d = pair.open_drafter(2);
    inject(pair, *d, 0, 20);
    const drafts before = draft_after(pair, *d, 0, 0, 20);
    const std::vector<float> row = pair.features(1);
    const int block = d->params().block_size;
    const std::vector<std::pair<const char *, std::function<void()>>> calls = {
        {"sequence -1", [&] { draft(*d, {{-1, {1, row.data()}, 5}}, 3); }},
        {"sequence 2", [&] { draft(*d, {{2, {1, row.data()}, 5}}, 3); }},
        {"sequence 2", [&] { d->inject(2, {1, row.data()}); }},
        {"sequence 2", [&] { static_cast<void>(d->length(2)); }},
        {"sequence 2", [&] { d->truncate(2, 0); }},
        {"sequence -1", [&] { d->copy(-1, 0, 0); }},
        {"sequence 9", [&] { d->copy(0, 9, 0); }},
        {"sequence 0", [&] { draft(*d, {{0, {1, row.data()}, 5}, {0, {1, row.data()}, 5}}, 3); }},
        {"token -1", [&] { draft(*d, {{0, {1, row.data()}, -1}}, 3); }},
        {"token 8192",
         [&] { draft(*d, {{1, {1, row.data()}, 5}, {0, {1, row.data()}, 8192}}, 3); }},
        {"0 tokens", [&] { draft(*d, {{0, {1, row.data()}, 5}}, 0); }},
        {"16 tokens", [&] { draft(*d, {{0, {1, row.data()}, 5}}, block); }},
        {"-1", [&] { d->truncate(0, -1); }},
        {"21", [&] { d->truncate(0, 21); }},
        {"21", [&] { d->copy(0, 1, 21); }},
        {"-1", [&] { d->copy(0, 1, -1); }},
        {"n_seq 0", [&] { pair.open_drafter(0); }},
        {"n_seq -1", [&] { pair.open_drafter(-1); }},
        {"draft_window -1", [&] { pair.open_drafter(1, 64, {}, -1); }},
        {"n_ctx 0", [&] { pair.open_drafter(1, 0); }},
        {"n_ctx 2147483647", [&] { pair.open_drafter(1, std::numeric_limits<int>::max()); }},
        {"top_k 0",
         [&] {
             fused_drafter(pair.model(), nullptr, pair.drafter_path(), shipped_params(), 1, 64, 0,
                           1);
         }},
        {"top_k 8193",
         [&] {
             fused_drafter(pair.model(), nullptr, pair.drafter_path(), shipped_params(), 1, 64,
                           8193, 1);
         }},
        {"n_threads 0",
         [&] {
             fused_drafter(pair.model(), nullptr, pair.drafter_path(), shipped_params(), 1, 64, 1,
                           0);
         }},
    };
    for (const auto & [part, call] : calls) {
        check::throws<std::invalid_argument>(call, part, part);
    }
    d->begin({}, 3);
    check::equal(d->length(0), 20, "length of the sequence");
    check::equal(d->length(1), 0, "length of the other");
    check::equal(draft_after(pair, *d, 0, 0, 20), before, "after the errors");
}

void features_that_are_not_finite_are_refused(const shipped_pair & pair) {
    const auto d = pair.open_drafter();
    inject(pair, *d, 0, 20);
    const drafts before = draft_after(pair, *d, 0, 0, 20);
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
        std::vector<float> rows = pair.features(100);
        rows.back() = bad;
        check::throws<dflash::backend_error>([&] { d->inject(0, {100, rows.data()}); },
                                             "not finite", "injected");
        check::throws<dflash::backend_error>([&] { draft(*d, {{0, {100, rows.data()}, 5}}, 3); },
                                             "not finite", "drafted");
    }
    check::equal(d->length(0), 20, "length");
    check::equal(draft_after(pair, *d, 0, 0, 20), before, "after the errors");
}

// A drafter whose weights are floats, its own head and embedding included, so that only the
// operations differ.
void fallbacks_equal_the_fast_operations(const shipped_pair & pair) {
    const temporary_file file;
    drafter_file wide(pair.drafter_path());
    wide.widen();
    wide.add_widened(pair.target_path(), "token_embd.weight", "token_embd.weight");
    wide.add_widened(pair.target_path(), "token_embd.weight", "output.weight");
    dflash::draft_params params = shipped_params();
    params.sliding_window = 50;
    params.is_sliding = {true, false, true};
    params.logit_scale = 0.8f;
    params.logit_cap = 20.0f;
    for (const char * layer : {"blk.0.", "blk.2."}) {
        wide.set(std::string(layer) + "attn_q.bias", GGML_TYPE_F32, {512});
        wide.set(std::string(layer) + "attn_output.bias", GGML_TYPE_F32, {512});
    }
    wide.write(file.path());
    const auto run = [&](const dflash::draft_capabilities & allowed) {
        fused_drafter d(pair.model(), nullptr, file.path(), params, 2, 1024, 8, 1, allowed);
        inject(pair, d, 0, 300);
        inject(pair, d, 1, 20, 7);
        const std::vector<float> rows = pair.features(5);
        return draft(d, {{1, {5, rows.data()}, 21}, {0, {2, rows.data()}, 22}}, 15);
    };
    const drafts fast = run({});
    check_candidates(fast, 8192);
    check_close(run({/*flash_attention=*/true, /*top_k=*/false}), fast, f32_noise, "top-k");
    check_close(run({/*flash_attention=*/false, /*top_k=*/true}), fast, attention_noise,
                "attention");
    check_close(run({/*flash_attention=*/false, /*top_k=*/false}), fast, attention_noise, "both");
}

// A draft that fails after its rows went in: they are out again.
void a_failed_draft_changes_nothing(const shipped_pair & pair) {
    const temporary_file file;
    drafter_file damaged(pair.drafter_path());
    damaged.set("output_norm.weight", {512}, std::vector<float>(512, NAN));
    damaged.write(file.path());
    for (const bool top_k : {true, false}) {
        fused_drafter d(pair.model(), nullptr, file.path(), shipped_params(), 2, 1024, 8, 2,
                        {true, top_k});
        inject(pair, d, 0, 20);
        for (const int n : {3, 100}) {  // fused with the block, or before it
            const std::vector<float> rows = pair.features(n);
            check::throws<dflash::backend_error>(
                [&] { draft(d, {{1, {n, rows.data()}, 5}, {0, {n, rows.data()}, 5}}, 3); },
                "not a number", "a drafter without numbers");
            check::equal(d.length(0), 20, "length");
            check::equal(d.length(1), 0, "length of the other");
        }
    }
}

// Greedy chains take one candidate, which is found in another way than several.
void the_best_is_the_first_of_several(const shipped_pair & pair) {
    for (const bool on_device : {true, false}) {
        const auto run = [&](int top_k) {
            fused_drafter d(pair.model(), nullptr, pair.drafter_path(), shipped_params(), 1, 1024,
                            top_k, 2, {/*flash_attention=*/true, on_device});
            inject(pair, d, 0, 40);
            return draft_after(pair, d, 0, 3, 40);
        };
        const drafts several = run(8);
        const drafts best = run(1);
        for (size_t i = 0; i < best.ids.size(); i++) {
            check::equal(best.ids[i], several.ids[8 * i], "token");
            const float difference = best.logprobs[i] - several.logprobs[8 * i];
            check::that(std::abs(difference) < 1e-5f, "log-probability");
        }
    }
}

const check::tests registered{
    {"drafts are candidates", drafts_are_candidates},
    {"the first position may draft", the_first_position_may_draft},
    {"the same inputs give the same drafts", the_same_inputs_give_the_same_drafts},
    {"rows may come in any portions", rows_may_come_in_any_portions},
    {"sequences do not see each other", sequences_do_not_see_each_other},
    {"a sequence drafts while others rest", a_sequence_drafts_while_others_rest},
    {"copies are of their own", copies_are_of_their_own},
    {"the cache grows up to the context", the_cache_grows_up_to_the_context},
    {"graphs come and go", graphs_come_and_go},
    {"bad arguments are refused", bad_arguments_are_refused},
    {"features that are not finite are refused", features_that_are_not_finite_are_refused},
    {"fallbacks equal the fast operations", fallbacks_equal_the_fast_operations},
    {"the best is the first of several", the_best_is_the_first_of_several},
    {"a failed draft changes nothing", a_failed_draft_changes_nothing},
};

}  // namespace
