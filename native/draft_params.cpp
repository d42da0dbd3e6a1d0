#include "draft_params.h"

#include <stdexcept>
#include <string>

namespace dflash {

namespace {

// Well beyond any drafter, and small enough that no product of them overflows.
constexpr int most_wide = 1 << 20;
constexpr int most_heads = 1 << 14;
constexpr int most_layers = 1 << 10;

void check_range(const char * name, int value, int low, int high) {
    if (value < low || value > high) {
        throw std::invalid_argument(std::string(name) + " of the drafter is " +
                                    std::to_string(value) + ", expected " + std::to_string(low) +
                                    " to " + std::to_string(high));
    }
}

void check_that(bool ok, const char * expected) {
    if (!ok) {
        throw std::invalid_argument(std::string("a drafter needs ") + expected);
    }
}

}  // namespace

void draft_params::check() const {
    check_range("n_embd", n_embd, 1, most_wide);
    check_range("n_layer", n_layer, 1, most_layers);
    check_range("n_head", n_head, 1, most_heads);
    check_range("n_head_kv", n_head_kv, 1, n_head);
    check_range("head_dim", head_dim, 1, most_heads);
    check_range("block_size", block_size, 2, most_layers);
    check_range("n_taps", n_taps, 1, most_layers);
    check_range("rope.n_dims", rope.n_dims, 2, head_dim);
    check_that(n_head % n_head_kv == 0, "the same number of heads for each head of keys");
    check_that(rope.n_dims % 2 == 0, "an even rope.n_dims");
    check_that(mask_token >= 0, "a mask_token of 0 or more");
    check_that(sliding_window >= 0, "a sliding_window of 0 or more");
    check_that(is_sliding.size() == static_cast<size_t>(n_layer), "is_sliding for each layer");
    check_that(rms_eps > 0.0f, "an rms_eps above 0");
    check_range("markov_rank", markov_rank, 0, most_wide);
    check_range("selector.rank", selector.rank, 0, most_wide);
    check_that(markov_rank == 0 || selector.rank == 0, "a Markov head or a selector, not both");
    if (selector.rank > 0) {
        check_range("selector.top_k", selector.top_k, 1, most_wide);
        check_range("selector.kernel_size", selector.kernel_size, 1, most_layers);
        check_range("selector.group_size", selector.group_size, 1, n_embd);
        check_that(n_embd % selector.group_size == 0, "a group_size that divides n_embd");
    }
}

}  // namespace dflash
