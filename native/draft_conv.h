#pragma once

#include "draft_params.h"
#include "ggml.h"

namespace dflash {

// DFlash 2: convolutions over the positions of a block, before a part of a layer and after it. Each
// position is mixed with those before it in its block. The kernels are a constant one per channel
// plus one per group of channels that follows from the part's input.
//
// Weights have their taps in reverse: the last one is for the position itself.
class draft_conv {
  public:
    // base: see conv_weights. of_groups: the product of its `proj` and of what the part is given,
    // f32 [groups * 2 n_taps, block * n_streams].
    draft_conv(ggml_context * nodes, const draft_params & params, ggml_tensor * base,
               ggml_tensor * of_groups);

    // x: f32 [n_embd, block * n_streams]
    ggml_tensor * before(ggml_tensor * x) const { return mix(x, 0); }
    ggml_tensor * after(ggml_tensor * x) const { return mix(x, 1); }

  private:
    ggml_tensor * mix(ggml_tensor * x, int side) const;

    ggml_context * nodes_;
    int64_t n_taps_;
    int64_t block_;
    ggml_tensor * kernels_;  // f32 [n_embd, 2 n_taps, block * n_streams]
};

}  // namespace dflash
