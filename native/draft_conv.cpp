#include "draft_conv.h"

#include <algorithm>

namespace dflash {

draft_conv::draft_conv(ggml_context * nodes, const draft_params & params, ggml_tensor * base,
                       ggml_tensor * of_groups)
    : nodes_(nodes), n_taps_(params.selector.kernel_size), block_(params.block_size) {
    const int64_t size = params.selector.group_size;
    const int64_t n_groups = params.n_embd / size;
    const int64_t n = of_groups->ne[1];
    of_groups = ggml_reshape_4d(nodes_, of_groups, 1, n_groups, 2 * n_taps_, n);
    ggml_tensor * of_channels = ggml_repeat_4d(nodes_, of_groups, size, n_groups, 2 * n_taps_, n);
    of_channels = ggml_reshape_3d(nodes_, of_channels, params.n_embd, 2 * n_taps_, n);
    kernels_ = ggml_add(nodes_, of_channels, base);
}

ggml_tensor * draft_conv::mix(ggml_tensor * x, int side) const {
    const int64_t width = x->ne[0];
    const int64_t n_streams = x->ne[1] / block_;
    const size_t row = x->nb[1];
    ggml_tensor * sum = nullptr;
    // How far back a position looks: the last tap is for the position itself.
    for (int64_t back = 0; back < std::min(n_taps_, block_); back++) {
        const int64_t n = block_ - back;
        const int64_t tap = (side + 1) * n_taps_ - 1 - back;
        ggml_tensor * kernel =
            ggml_view_3d(nodes_, kernels_, width, n, n_streams, kernels_->nb[2],
                         kernels_->nb[2] * block_, tap * kernels_->nb[1] + back * kernels_->nb[2]);
        ggml_tensor * rows = ggml_view_3d(nodes_, x, width, n, n_streams, row, row * block_, 0);
        ggml_tensor * part = ggml_mul(nodes_, kernel, rows);
        sum = sum == nullptr ? part
                             : ggml_acc(nodes_, sum, part, sum->nb[1], sum->nb[2], sum->nb[3],
                                        back * sum->nb[1]);
    }
    return ggml_reshape_2d(nodes_, sum, width, block_ * n_streams);
}

}  // namespace dflash
