#pragma once

#include "backend.h"
#include "few_rows.h"
#include "ggml.h"

namespace dflash {

// A product whose input may leave the range of f16. Backends make halves of the input where the
// weights are halves, so there it is made smaller first: what is lost of its last bits is less than
// 1e-4. bf16 has the range of f32 by itself; asked for f32, CUDA would widen the weights each time.
inline ggml_tensor * wide_product(ggml_context * c, ggml_tensor * weight, ggml_tensor * x) {
    constexpr float smaller = 1.0f / 1024;
    const bool is_half = weight->type == GGML_TYPE_F16;
    ggml_tensor * y = ggml_mul_mat(c, weight, is_half ? ggml_scale(c, x, smaller) : x);
    if (weight->type != GGML_TYPE_BF16) {
        ggml_prec_set_acc(y, GGML_PREC_F32);
    }
    return is_half ? ggml_scale(c, y, 1.0f / smaller) : y;
}

// The input of a product, with columns of zeros where that makes it faster: 6 to 8 columns take
// CUDA longer than 9. With the head of an 8B model in q6_K an H200 takes 510 microseconds for 7
// columns, 401 for 9. Our own kernels do not need it.
inline ggml_tensor * widened(ggml_context * c, ggml_backend_t backend, const ggml_tensor * weight,
                             ggml_tensor * x) {
    constexpr int64_t slowest = 6;
    constexpr int64_t faster = 9;
    const int64_t n = x->ne[1];
    const bool is_slow = ggml_is_quantized(weight->type) && n >= slowest && n < faster;
    return is_slow && is_cuda(backend) && !takes_few_rows(backend, weight, n)
               ? ggml_pad(c, x, 0, static_cast<int>(faster - n), 0, 0)
               : x;
}

// The columns of a product that are not of such zeros.
inline ggml_tensor * first_columns(ggml_context * c, ggml_tensor * y, int64_t n) {
    return y->ne[1] == n ? y : ggml_view_2d(c, y, y->ne[0], n, y->nb[1], 0);
}

}  // namespace dflash
