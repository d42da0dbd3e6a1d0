#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "llama-cpp.h"

namespace dflash {

// How a token is drawn from a row of logits. The samplers are llama.cpp's, and the rule's own.
struct draw_rule {
    int n_vocab = 0;
    llama_sampler_ptr bias_chain = nullptr;    // bias, penalties, DRY; null: none
    llama_sampler_ptr filter_chain = nullptr;  // top-n-sigma, top-k, typical, top-p; null: none
    llama_sampler_ptr pick_chain = nullptr;    // what follows; null: see `temperature`
    int top_k = 0;                             // of `filter_chain`; 0: off
    float top_p = 1.0f;                        // of `filter_chain`; 1: off
    float min_p = 0.0f;                        // of `pick_chain`; 0: off
    bool reorders = false;                     // `filter_chain` leaves no descending order: typical
    float most_raised = 0.0f;                  // by how much `bias_chain` may raise a logit
    float temperature = 0.0f;                  // of draws from all tokens; 0: the largest is taken
    uint32_t seed = 0;                         // of these
    int n_candidates = 0;  // that are enough for most draws; 0: it takes the whole row
    bool bound = false;    // a grammar may forbid what is drawn
};

// How the exponentials that are added up may differ from llama.cpp's, in units in the last place.
struct rounding {
    double each;    // by chance, of one: the root of its mean square
    double common;  // by the same part of the exponent of all
};

// What a draw reads of a row of logits, if that is enough.
enum class draw_needs {
    best,                // its largest
    sums,                // sum(exp((x - peak) / T)) of its chunks, and then the logits of one
    candidates,          // the `n_candidates` largest
    candidates_and_sum,  // and log(sum(exp(x))) over the row
    row,
};

// Draws from all tokens, with nothing but a temperature, are computed here as llama.cpp computes
// them: a number from the generator, and the first token, by id, at which the sum of exp(x / T)
// reaches that share of the whole. Sums of chunks, from a device or from vectors on the host, tell
// the chunk in which that token is, and only that chunk is gone through. They are rounded
// otherwise: where that might matter, all is added up as llama.cpp does.
class token_draw {
  public:
    // In place of a token.
    static constexpr int32_t not_finite = -1;
    static constexpr int32_t nothing_left = -2;
    static constexpr int32_t needs_whole_row = -3;
    static constexpr int32_t needs_order = -4;

    // Throws std::invalid_argument for more candidates than there are tokens.
    explicit token_draw(draw_rule rule);

    const draw_rule & rule() const { return rule_; }
    draw_needs needs() const;

    // Whether nothing has been drawn yet.
    bool is_first() const { return is_first_; }

    // Moves the state past a token that comes next. Penalties look back on it.
    void accept(int32_t token);

    // Call this with what was drawn: `accept`, unless a grammar may still forbid it.
    void settle(int32_t token);

    // Draws a token from a row of logits, [n_vocab], none of which is a NaN. `nothing_left` if all
    // that could be drawn are -inf.
    int32_t from_row(const float * row);

    // The same, given only the n largest logits of the row, the largest first, of rules with top-k,
    // min-p, top-p without bias or penalties, or of those that take the largest. The token and the
    // state of the samplers afterwards are the same. `needs_whole_row`, with nothing changed, if
    // other logits might matter: they might get among those that are kept. `log_sum` is
    // log(sum(exp(x))) over the whole row, for top-p without top-k.
    //
    // Tokens of equal logits have the same chance, so their order does not change at which place
    // the draw ends, only which of them is there. That depends on the whole row: `needs_order` if
    // one of them is drawn. The state is then that after the draw, and `in_order_of` tells the
    // token.
    int32_t from_candidates(const int32_t * ids, const float * logits, int n, double log_sum);
    int32_t in_order_of(const float * row);

    // The chunk in which a draw from all tokens ends, given the sum of exp((x - peak) / T) in each,
    // as a device computes them. `needs_whole_row` if another one is within its rounding.
    int32_t chunk_of(const float * sums, int n, float peak);

    // The token, given the n logits of that chunk; or `needs_whole_row`.
    int32_t from_chunk(const float * logits, int n);

  private:
    void take(const float * row);
    size_t nucleus(double log_sum) const;
    int32_t choose(bool is_cut);
    int32_t choose_among(size_t k, float most_outside, bool is_cut);
    int32_t from_all(const float * row);
    int32_t place_in(const float * sums, int n, float peak, const rounding & kind);
    double number();

    draw_rule rule_;
    bool is_first_ = true;
    std::vector<llama_token_data> data_;
    std::ptrdiff_t place_ = 0;  // in `data_` of the last choice

    std::mt19937 random_;
    std::optional<double> unused_;  // drawn, but the row has yet to come
    struct {
        float peak;
        double before;  // sum of the chunks before it
        double target;
        double margin;  // for the rounding of the sums
    } chunk_ = {};
};

}  // namespace dflash
