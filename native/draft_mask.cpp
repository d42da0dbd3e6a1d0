#include "draft_mask.h"

#include <algorithm>
#include <cmath>

namespace dflash {

draft_mask::draft_mask(ggml_fp16_t * mask, int n_kv, int n_rows)
    : mask_(mask), n_kv_(n_kv), shown_(n_rows) {
    std::fill_n(mask_, static_cast<size_t>(n_kv) * n_rows, ggml_fp32_to_fp16(-INFINITY));
}

void draft_mask::show(int row, int first, int end) {
    const ggml_fp16_t visible = ggml_fp32_to_fp16(0.0f);
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY);
    ggml_fp16_t * cells = mask_ + static_cast<size_t>(row) * n_kv_;
    const auto fill = [&](int from, int to, ggml_fp16_t value) {
        if (from < to) {
            std::fill(cells + from, cells + to, value);
        }
    };
    range & shown = shown_[row];
    fill(shown.first, std::min(shown.end, first), hidden);
    fill(std::max(shown.first, end), shown.end, hidden);
    fill(first, std::min(end, shown.first), visible);
    fill(std::max(first, shown.end), end, visible);
    shown = {first, end};
}

}  // namespace dflash
