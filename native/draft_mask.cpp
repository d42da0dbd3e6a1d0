#include "draft_mask.h"

#include <algorithm>
#include <cmath>

namespace dflash {

draft_mask::draft_mask(ggml_fp16_t * mask, int n_kv, int n_rows, int n_ring)
    : mask_(mask), n_kv_(n_kv), n_ring_(n_ring), shown_(n_rows) {
    std::fill_n(mask_, static_cast<size_t>(n_kv) * n_rows, ggml_fp32_to_fp16(-INFINITY));
}

void draft_mask::fill(int row, int first, int end, float value) {
    ggml_fp16_t * cells = mask_ + static_cast<size_t>(row) * n_kv_;
    while (first < end) {  // up to the end of the ring, then on from its start
        const int cell = first % n_ring_;
        const int n = std::min(end - first, n_ring_ - cell);
        std::fill_n(cells + cell, n, ggml_fp32_to_fp16(value));
        first += n;
    }
}

void draft_mask::show(int row, int first, int end) {
    range & shown = shown_[row];
    // Hide first, then show: new positions may be in the cells of old ones.
    fill(row, shown.first, std::min(shown.end, first), -INFINITY);
    fill(row, std::max(shown.first, end), shown.end, -INFINITY);
    fill(row, first, std::min(end, shown.first), 0.0f);
    fill(row, std::max(first, shown.end), end, 0.0f);
    shown = {first, end};
}

}  // namespace dflash
