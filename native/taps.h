#pragma once

#include <cstdint>
#include <vector>

#include "llama.h"

namespace dflash {

// Hidden states of a target: the inputs of chosen layers (the residual stream after the layer
// before), for every row of the last batch. Switched on once, before the first decode: each change
// makes llama.cpp reserve its graphs anew. The context must outlive it.
class taps {
  public:
    // Throws std::invalid_argument for a layer outside 1 .. n_layer - 1.
    taps(llama_context * ctx, std::vector<int32_t> layers);

    int n_taps() const { return static_cast<int>(layers_.size()); }
    int n_embd() const { return n_embd_; }

    // Copies rows of the last batch to out, [n_rows, n_taps, n_embd]. The caller knows that the
    // last decode had those rows.
    void gather(const int32_t * rows, int n_rows, float * out) const;

  private:
    llama_context * ctx_;
    std::vector<int32_t> layers_;
    int n_embd_;
};

}  // namespace dflash
