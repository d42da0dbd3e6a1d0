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

// The path selector and the convolutions of DFlash 2.
struct selector_params {
    int rank = 0;  // 0: there is none
    int top_k = 0;
    int kernel_size = 0;
    int group_size = 1;
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
    bool values_from_keys = false;
    bool causal = false;       // positions of a block do not see the later ones
    bool from_anchor = false;  // the output at the anchor is a draft, too
    int markov_rank = 0;       // DSpark; 0: there is no Markov head
    selector_params selector;
    rope_params rope;

    int n_features() const { return n_taps * n_embd; }
    int n_embd_kv() const { return n_head_kv * head_dim; }
    int n_drafts() const { return from_anchor ? block_size : block_size - 1; }  // at most

    // The rank of the table in which a head looks up the token before; 0: it does not.
    int rank() const { return markov_rank > 0 ? markov_rank : selector.rank; }

    // Throws std::invalid_argument for numbers with which no graph can be built. Whether the others
    // are right is checked with the tensors of the file.
    void check() const;
};

}  // namespace dflash
