// The native drafter on the shipped pair: limits, errors, fallbacks. That its drafts are right is
// tested in Python, against the reference.

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "drafter_file.h"
#include "drafts.h"
#include "errors.h"
#include "fused_drafter.h"
#include "shipped_pair.h"

using dflash::fused_drafter;

namespace {

// How far apart log-probabilities may lie beside `q8_noise`: attention rounds queries and weights
// to halves here or there; floats do not.
constexpr float attention_noise = 5e-3f;
constexpr float f32_noise = 1e-4f;

void drafts_are_candidates(const shipped_pair & pair) {
    const auto d = pair.open_drafter();
    d->copy(0, 0, 0);  // before there is a cache
    check::equal(d->n_cache_bytes(), size_t{0}, "memory before the first row");
    check_candidates(draft_after(pair, *d, 0, 40, 0), d->n_vocab());
    check::equal(d->length(0), 40, "length");
    check_candidates(draft_after(pair, *d, 0, 0, 40), d->n_vocab());  // no new rows
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

const check::tests registered{
    {"drafts are candidates", drafts_are_candidates},
    {"graphs come and go", graphs_come_and_go},
    {"bad arguments are refused", bad_arguments_are_refused},
    {"features that are not finite are refused", features_that_are_not_finite_are_refused},
    {"fallbacks equal the fast operations", fallbacks_equal_the_fast_operations},
    {"a failed draft changes nothing", a_failed_draft_changes_nothing},
};

}  // namespace
