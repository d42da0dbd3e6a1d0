// Passes of the shipped target: the likeliest tokens, logits, and what is refused.

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <random>

#include "drafts.h"
#include "errors.h"

using dflash::batch_row;
using dflash::target_pass;

namespace {

void check_best(target_pass & pass, int n_outputs, const std::string & what) {
    check::equal(pass.n_outputs(), n_outputs, what + ": number of outputs");
    for (int i = 0; i < n_outputs; i++) {
        const std::vector<float> logits = pass.logits(i);
        const auto largest = std::max_element(logits.begin(), logits.end()) - logits.begin();
        check::equal(pass.best(i), static_cast<int32_t>(largest),
                     what + ": output row " + std::to_string(i));
    }
}

// Rows of two sequences, some with outputs, at any width.
void the_best_are_the_largest_logits(const shipped_pair & pair) {
    const opened_target target = pair.open_target(pair.layers(), pair.n_batch, 2);
    std::mt19937 random(4);
    int lengths[] = {0, 0};
    for (const int width : {1, 2, 16, 3, 7, 8, 9, 1, 1, 12}) {
        std::vector<batch_row> rows;
        int n_outputs = 0;
        for (int seq = 0; seq < 2; seq++) {
            for (batch_row row : pair.rows(width, lengths[seq], seq)) {
                row.output = random() % 2 == 0;
                n_outputs += row.output ? 1 : 0;
                rows.push_back(row);
            }
            lengths[seq] += width;
        }
        check::equal(target.pass->decode(rows), 0, "status");
        check_best(*target.pass, n_outputs, "width " + std::to_string(width));
    }
}

// The way of models whose batches llama.cpp may split.
void passes_without_the_graph_give_the_same(const shipped_pair & pair) {
    const opened_target target = pair.open_target({});
    const opened_target plain = pair.open_target({});
    target_pass outside(plain.ctx.get(), 1, {}, pair.n_batch, /*in_graph=*/false);
    llama_set_sampler(plain.ctx.get(), 0, nullptr);  // else its graph is that of the first pass
    int done = 0;
    for (const int width : {20, 1, 5}) {
        std::vector<batch_row> rows = pair.rows(width, done);
        rows.front().output = true;
        check::equal(target.pass->decode(rows), 0, "status");
        check::equal(outside.decode(rows), 0, "status outside");
        for (int i = 0; i < outside.n_outputs(); i++) {
            check::equal(outside.best(i), target.pass->best(i), "best");
            check::equal(outside.logits(i), target.pass->logits(i), "logits");
        }
        done += width;
    }
    check::that(outside.store() == nullptr, "a store without a graph");
    check::throws<std::invalid_argument>(
        [&] { target_pass(plain.ctx.get(), 1, pair.layers(), 256, false); }, "cannot be tapped",
        "taps");
}

// Two sequences in both targets, with prompts that are decoded: their next rows.
std::vector<batch_row> after_prompts(const shipped_pair & pair, const opened_target & ahead,
                                     const opened_target & stepwise) {
    std::vector<batch_row> next;
    for (int seq = 0; seq < 2; seq++) {
        const std::vector<batch_row> prompt = pair.rows(20 + seq, 0, seq);
        check::equal(ahead.pass->decode(prompt), 0, "status");
        check::equal(stepwise.pass->decode(prompt), 0, "status");
        next.push_back({stepwise.pass->best(0), 20 + seq, seq, true});
    }
    return next;
}

struct sampled {
    explicit sampled(int n_vocab, bool from_all) {
        const auto chain = [&](std::initializer_list<llama_sampler *> samplers) {
            llama_sampler_ptr made(llama_sampler_chain_init(llama_sampler_chain_default_params()));
            for (llama_sampler * each : samplers) {
                llama_sampler_chain_add(made.get(), each);
            }
            return made;
        };
        dflash::draw_rule rule;
        rule.n_vocab = n_vocab;
        rule.seed = 5;
        if (from_all) {
            rule.temperature = 0.8f;
        } else {
            rule.bias_chain = chain({llama_sampler_init_penalties(n_vocab, 64, 1.1f, 0.2f, 0.1f)});
            rule.filter_chain =
                chain({llama_sampler_init_top_k(20), llama_sampler_init_top_p(0.95f, 1)});
            rule.pick_chain = chain({llama_sampler_init_min_p(0.05f, 1),
                                     llama_sampler_init_temp(0.8f), llama_sampler_init_dist(5)});
            rule.top_k = 20;
            rule.top_p = 0.95f;
            rule.min_p = 0.05f;
            rule.n_candidates = 85;
        }
        draw = std::make_unique<dflash::token_draw>(std::move(rule));
    }

    std::unique_ptr<dflash::token_draw> draw;
};

// Each sequence in its own way, on the host or as on a device.
void steps_ahead_draw_what_whole_rows_draw(const shipped_pair & pair) {
    constexpr int n_steps = 12;
    for (const bool on_device : {false, true}) {
        const opened_target ahead = pair.open_target({}, pair.n_batch, 2);
        const opened_target stepwise = pair.open_target({}, pair.n_batch, 2);
        ahead.pass->search_on_cpu = on_device;
        const int n_vocab = ahead.pass->n_vocab();
        sampled first(n_vocab, false), second(n_vocab, true);
        sampled same_first(n_vocab, false), same_second(n_vocab, true);
        std::vector<batch_row> next = after_prompts(pair, ahead, stepwise);
        std::vector<int32_t> found;
        check::equal(ahead.pass->decode_ahead(next, n_steps, {first.draw.get(), second.draw.get()},
                                              {}, found),
                     0, "status");
        for (size_t i = 0; i < found.size(); i++) {
            const auto seq = static_cast<int>(i % 2);
            if (seq == 0) {
                check::equal(stepwise.pass->decode(next), 0, "status");
            }
            dflash::token_draw & draw = seq == 0 ? *same_first.draw : *same_second.draw;
            next[seq].token = draw.from_row(stepwise.pass->logits(seq).data());
            draw.settle(next[seq].token);
            next[seq].position++;
            check::equal(found[i], next[seq].token, "token " + std::to_string(i));
        }
        check::that(ahead.pass->draw_s() > 0, "seconds of the draws");
    }
    check::throws<std::invalid_argument>(
        [&] {
            std::vector<int32_t> found;
            pair.open_target({}).pass->decode_ahead(pair.rows(1), 1, {}, {}, found);
        },
        "own way to draw", "no draws");
}

void layers_that_are_not_there_are_refused(const shipped_pair & pair) {
    const int n_layer = llama_model_n_layer(pair.model());
    for (const int layer : {-1, 0, n_layer, 1 << 30}) {
        check::throws<std::invalid_argument>([&] { pair.open_target({2, layer}); },
                                             std::to_string(layer), "layer");
    }
}

void stores_without_rows_are_refused(const shipped_pair & pair) {
    for (const int n_stored : {0, -5}) {
        check::throws<std::invalid_argument>([&] { pair.open_target(pair.layers(), n_stored); },
                                             std::to_string(n_stored) + " rows", "rows");
    }
}

void logits_of_other_rows_are_refused(const shipped_pair & pair) {
    const opened_target target = pair.open_target({});
    std::vector<int32_t> ids;
    std::vector<float> found;
    const auto refused = [&](int row) {
        const std::string part = "output row " + std::to_string(row);
        check::throws<std::invalid_argument>([&] { target.pass->logits(row); }, part, "logits");
        check::throws<std::invalid_argument>([&] { target.pass->candidates(row, 1, ids, found); },
                                             part, "candidates");
    };
    refused(0);
    check::equal(target.pass->decode(pair.rows(4)), 0, "status");
    refused(-1);
    refused(1);
}

void passes_of_too_many_rows_are_refused(const shipped_pair & pair) {
    const opened_target target = pair.open_target(pair.layers());
    for (const int n : {0, pair.n_batch + 1, 4 * pair.n_batch}) {
        check::throws<std::invalid_argument>([&] { target.pass->decode(pair.rows(n)); },
                                             "a pass of " + std::to_string(n) + " rows", "rows");
    }
    check::equal(target.pass->decode(pair.rows(pair.n_batch)), 0, "status");
}

void a_full_context_is_a_status(const shipped_pair & pair) {
    const opened_target target = pair.open_target(pair.layers());
    const auto n_ctx = static_cast<int>(llama_n_ctx(target.ctx.get()));
    for (int done = 0; done < n_ctx; done += pair.n_batch) {
        check::equal(target.pass->decode(pair.rows(pair.n_batch, done)), 0, "status");
    }
    check::equal(target.pass->decode(pair.rows(1, n_ctx)), 1, "status of a row too many");
    check::equal(target.pass->n_outputs(), 0, "outputs of a pass that failed");
    llama_memory_seq_rm(llama_get_memory(target.ctx.get()), 0, n_ctx - 5, -1);
    check::equal(target.pass->decode(pair.rows(5, n_ctx - 5)), 0, "status after a roll-back");
    check_best(*target.pass, 1, "after a roll-back");
}

void handles_close_in_any_order(const shipped_pair & pair) {
    const opened_target steady = pair.open_target(pair.layers());
    check::equal(steady.pass->decode(pair.rows(10)), 0, "status");
    opened_target target = pair.open_target(pair.layers());
    auto first = pair.open_drafter(target.pass->store());
    auto second = pair.open_drafter(steady.pass->store());
    auto unused = pair.open_drafter(target.pass->store());
    inject(pair, *first, 0, 10);
    inject(pair, *second, 0, 10);
    const drafts expected = draft_after(pair, *first, 0, 0, 10);
    first.reset();
    unused.reset();
    target.ctx.reset();
    target.pass.reset();
    check::equal(draft_after(pair, *second, 0, 0, 10), expected, "after the others are closed");
    check::equal(steady.pass->decode(pair.rows(3, 10)), 0, "status");
}

const check::tests registered{
    {"the best are the largest logits", the_best_are_the_largest_logits},
    {"passes without the graph give the same", passes_without_the_graph_give_the_same},
    {"steps ahead draw what whole rows draw", steps_ahead_draw_what_whole_rows_draw},
    {"layers that are not there are refused", layers_that_are_not_there_are_refused},
    {"stores without rows are refused", stores_without_rows_are_refused},
    {"logits of other rows are refused", logits_of_other_rows_are_refused},
    {"passes of too many rows are refused", passes_of_too_many_rows_are_refused},
    {"a full context is a status", a_full_context_is_a_status},
    {"handles close in any order", handles_close_in_any_order},
};

}  // namespace
