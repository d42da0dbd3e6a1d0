#pragma once

#include <cstdint>
#include <vector>

namespace dflash {

// RoPE of the drafter, as ggml_rope_ext takes it.
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

// Hyperparameters of a drafter. Python reads them from the keys of its file and checks them.
struct draft_params {
    int n_embd = 0;
    int n_layer = 0;
    int n_head = 0;
    int n_head_kv = 0;
    int head_dim = 0;
    int block_size = 0;
    int mask_token = 0;
    int n_taps = 0;
    int sliding_window = 0;        // 0: no layer has a window
    std::vector<bool> is_sliding;  // per layer
    float rms_eps = 1e-6f;
    float attention_scale = 1.0f;
    float value_scale = 0.0f;  // of the attention's output; 0: none
    float embedding_scale = 1.0f;
    float logit_scale = 0.0f;  // 0: none
    float logit_cap = 0.0f;    // soft limit of the logits; 0: none
    bool gelu = false;         // else silu
    rope_params rope;

    int n_features() const { return n_taps * n_embd; }
    int n_embd_kv() const { return n_head_kv * head_dim; }

    // Throws std::invalid_argument for numbers with which no graph can be built. Whether the others
    // are right is checked with the tensors of the file.
    void check() const;
};

}  // namespace dflash
