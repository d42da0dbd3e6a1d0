#pragma once

#include <cstdint>
#include <vector>

#include "llama.h"

namespace dflash {

// How a token is drawn from a row of logits. The samplers are llama.cpp's.
struct draw_rule {
    int n_vocab = 0;
    llama_sampler * altering = nullptr;  // bias, penalties, DRY; null: none
    llama_sampler * choosing = nullptr;  // what follows; null: the largest is taken
    int top_k = 0;                       // of `choosing`; 0: off
    float min_p = 0.0f;                  // of `choosing`, whose top-p and typical are then off
    float most_raised = 0.0f;            // by how much `altering` may raise a logit
};

class token_draw {
  public:
    static constexpr int32_t needs_whole_row = -1;
    static constexpr int32_t nothing_left = -2;

    explicit token_draw(const draw_rule & rule) : rule_(rule) {}

    int n_vocab() const { return rule_.n_vocab; }

    // Draws a token from a row of logits, [n_vocab], none of which is a NaN. `nothing_left` if all
    // that could be drawn are -inf.
    int32_t from_row(const float * row);

    // The same, given only the n largest logits of the row, the largest first. The token and the
    // state of the samplers afterwards are the same. `needs_whole_row`, with nothing changed, if
    // other logits might matter: they might get among those that are kept, or some of these are
    // equal, and their order depends on the whole row.
    int32_t from_candidates(const int32_t * ids, const float * logits, int n);

  private:
    int32_t choose();

    draw_rule rule_;
    std::vector<llama_token_data> data_;
};

}  // namespace dflash
