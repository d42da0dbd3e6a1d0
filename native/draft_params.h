#pragma once

#include <cstdint>
#include <vector>

#include "gguf.h"

namespace dflash {

// RoPE of the drafter as ggml_rope_ext takes it; the same reading of the keys as llama.cpp's.
struct rope_params {
    int n_dims = 0;
    int n_ctx_orig = 0;
    float freq_base = 10000.0f;
    float freq_scale = 1.0f;
    float ext_factor = 0.0f;
    float attn_factor = 1.0f;
    float beta_fast = 32.0f;
    float beta_slow = 1.0f;
};

// Hyperparameters of a drafter file (architecture `dflash`).
struct draft_params {
    int n_embd = 0;
    int n_layer = 0;
    int n_head = 0;
    int n_head_kv = 0;
    int head_dim = 0;
    int block_size = 0;
    int mask_token = 0;
    int sliding_window = 0;              // 0: no layer has a window
    std::vector<bool> is_sliding;        // per layer
    std::vector<int32_t> target_layers;  // tap k is the input of this target layer
    float rms_eps = 1e-6f;
    float attention_scale = 0.0f;  // already resolved: never 0 after reading
    float value_scale = 0.0f;      // of what attention puts out; 0: none
    float embedding_scale = 1.0f;
    float logit_scale = 0.0f;  // 0: none
    float logit_cap = 0.0f;    // no logit exceeds it; 0: none
    bool gelu = false;
    rope_params rope;

    int n_taps() const { return static_cast<int>(target_layers.size()); }
    int n_features() const { return n_taps() * n_embd; }
    int n_embd_kv() const { return n_head_kv * head_dim; }

    // Throws file_error naming the key that is missing or has another type.
    static draft_params read(const gguf_context * gguf);
};

}  // namespace dflash
