#include "taps.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "llama_seam.h"

namespace dflash {

taps::taps(llama_context * ctx, std::vector<int32_t> layers)
    : ctx_(ctx), layers_(std::move(layers)), n_embd_(llama_model_n_embd(llama_get_model(ctx))) {
    const int n_layer = llama_model_n_layer(llama_get_model(ctx));
    for (const int32_t layer : layers_) {
        if (layer < 1 || layer >= n_layer) {
            throw std::invalid_argument("cannot tap the input of layer " + std::to_string(layer) +
                                        "; the target offers 1 .. " + std::to_string(n_layer - 1));
        }
    }
    for (const int32_t layer : layers_) {
        llama_set_embeddings_layer_inp(ctx_, static_cast<uint32_t>(layer), true);
    }
}

void taps::gather(const int32_t * rows, int n_rows, float * out) const {
    if (n_rows == 0) {
        return;  // before the first decode llama.cpp has no states, and aborts when asked for them
    }
    for (size_t k = 0; k < layers_.size(); k++) {
        const float * states =
            llama_get_embeddings_layer_inp(ctx_, static_cast<uint32_t>(layers_[k]));
        for (int i = 0; i < n_rows; i++) {
            const float * row = states + static_cast<size_t>(rows[i]) * n_embd_;
            std::copy_n(row, n_embd_, out + (i * layers_.size() + k) * n_embd_);
        }
    }
}

}  // namespace dflash
