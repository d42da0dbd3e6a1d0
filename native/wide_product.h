#pragma once

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

}  // namespace dflash
