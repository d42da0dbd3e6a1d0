#include "draft_conv.h"

namespace dflash {

draft_conv::draft_conv(ggml_context * nodes, const draft_params & params,
                       const conv_weights & weights, ggml_tensor * x)
    : nodes_(nodes), n_taps_(params.selector.kernel_size), block_(params.block_size) {
    const int64_t size = params.selector.group_size;
    const int64_t n_groups = params.n_embd / size;
    const int64_t n = x->ne[1];
    ggml_tensor * of_groups = ggml_mul_mat(nodes_, weights.proj, x);
    of_groups = ggml_reshape_4d(nodes_, of_groups, 1, n_groups, 2 * n_taps_, n);
    ggml_tensor * of_channels = ggml_repeat_4d(nodes_, of_groups, size, n_groups, 2 * n_taps_, n);
    of_channels = ggml_reshape_3d(nodes_, of_channels, params.n_embd, 2 * n_taps_, n);
    kernels_ = ggml_add(nodes_, of_channels, weights.base);
}

ggml_tensor * draft_conv::mix(ggml_tensor * x, int side) const {
    const int64_t width = x->ne[0];
    const int64_t n_streams = x->ne[1] / block_;
    x = ggml_reshape_3d(nodes_, x, width, block_, n_streams);
    const auto n_before = static_cast<int>(n_taps_ - 1);
    if (n_before > 0) {
        x = ggml_pad_ext(nodes_, x, 0, 0, n_before, 0, 0, 0, 0, 0);
    }
    ggml_tensor * sum = nullptr;
    for (int64_t tap = 0; tap < n_taps_; tap++) {
        const size_t row = kernels_->nb[2];
        ggml_tensor * kernel = ggml_view_3d(nodes_, kernels_, width, block_, n_streams, row,
                                            row * block_, (side * n_taps_ + tap) * kernels_->nb[1]);
        ggml_tensor * rows =
            ggml_view_3d(nodes_, x, width, block_, n_streams, x->nb[1], x->nb[2], tap * x->nb[1]);
        ggml_tensor * part = ggml_mul(nodes_, kernel, rows);
        sum = sum != nullptr ? ggml_add(nodes_, sum, part) : part;
    }
    return ggml_reshape_2d(nodes_, sum, width, block_ * n_streams);
}

}  // namespace dflash
