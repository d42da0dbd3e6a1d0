#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "draft_params.h"
#include "draft_tensors.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

// DFlash 2's convolutions around one part of a layer. See draft_graph.cpp, which also says in which
// order the taps are.
struct conv_weights {
    ggml_tensor * base = nullptr;  // f32 [n_embd, 2 kernel_size]
    ggml_tensor * proj = nullptr;  // [n_embd, groups * 2 kernel_size]
};

// DSpark's Markov head, on the rows of the output head. See dspark_head.h.
struct markov_weights {
    ggml_tensor * before = nullptr;      // [rank, rows]: of the token before
    ggml_tensor * after = nullptr;       // [rank, rows]: of the token itself
    ggml_tensor * confidence = nullptr;  // f32 [n_embd, 1], optional: what the state adds to it
    std::vector<float> of_token;         // what each of the target's tokens before adds to it
};

// DFlash 2's path selector, on the rows of the output head. See dflash2_head.h.
struct selector_weights {
    ggml_tensor * before = nullptr;  // [rank, rows]: of the token before
    ggml_tensor * after = nullptr;   // [rank, rows]: of the token itself
    ggml_tensor * gate = nullptr;    // [n_embd, rank]
};

struct draft_layer {
    ggml_tensor * attn_norm = nullptr;
    ggml_tensor * attn_q = nullptr;
    ggml_tensor * attn_k = nullptr;
    ggml_tensor * attn_v = nullptr;  // null: values are made from the keys
    ggml_tensor * attn_output = nullptr;
    ggml_tensor * attn_sinks = nullptr;   // f32 [n_head], optional
    ggml_tensor * attn_q_bias = nullptr;  // optional, like the next three
    ggml_tensor * attn_k_bias = nullptr;
    ggml_tensor * attn_v_bias = nullptr;
    ggml_tensor * attn_output_bias = nullptr;
    ggml_tensor * attn_q_norm = nullptr;
    ggml_tensor * attn_k_norm = nullptr;
    ggml_tensor * attn_post_norm = nullptr;  // optional
    ggml_tensor * ffn_norm = nullptr;
    ggml_tensor * ffn_gate = nullptr;
    ggml_tensor * ffn_up = nullptr;
    ggml_tensor * ffn_down = nullptr;
    ggml_tensor * ffn_post_norm = nullptr;  // optional
    ggml_tensor * output_scale = nullptr;   // optional
    conv_weights attn_conv;                 // optional
    conv_weights ffn_conv;                  // optional

    // Several of the above in one tensor, so that one product computes all; null if types differ.
    ggml_tensor * attn_qkv = nullptr;       // [n_embd, q + 2 kv]
    ggml_tensor * attn_qkv_bias = nullptr;  // optional
    ggml_tensor * ffn_gate_up = nullptr;    // [n_embd, 2 n_ff]
};

// The weights of one drafter file, in the memory of one device.
class draft_weights {
  public:
    // Throws file_error for a file that lacks tensors, has tensors that the draft graph does not
    // know or whose shape or type is not as `params` say, or ends too early; backend_error if the
    // device has no room; std::invalid_argument as draft_params::check.
    // bf16: whether quantised matrices become bf16; none: if that pays, see bf16_weights.h.
    draft_weights(const std::string & path, const draft_params & params, ggml_backend_t backend,
                  std::optional<bool> bf16 = std::nullopt);

    size_t n_bytes() const { return tensors_.n_bytes(); }

    const draft_params params;
    ggml_tensor * fc = nullptr;        // [n_taps * n_embd, n_embd]
    ggml_tensor * fc_norm = nullptr;   // RMSNorm after fc
    ggml_tensor * out_norm = nullptr;  // RMSNorm before the head
    ggml_tensor * rope_freqs = nullptr;
    ggml_tensor * embedding = nullptr;  // the drafter's own, in host memory; null: the target's
    ggml_tensor * head = nullptr;       // the drafter's own; null: the target's
    // The token of each row of a head that knows only some of them; else empty.
    std::vector<int32_t> tokens;
    markov_weights markov;
    selector_weights selector;
    // [rank, n_vocab], in host memory: what a head looks up for the anchor; null: nothing
    ggml_tensor * anchor_table = nullptr;
    std::vector<draft_layer> layers;

    // K and V of all layers in one product, for injected rows; null if types differ.
    ggml_tensor * all_kv = nullptr;       // [n_embd, 2 kv, n_layer]
    ggml_tensor * all_kv_bias = nullptr;  // f32 [2 kv, 1, n_layer], optional
    ggml_tensor * all_k_norm = nullptr;   // f32 [head_dim, 1, 1, n_layer]

    // Whether values may leave the range of f16, of which the cache is.
    bool has_large_values = false;

    // A factor of all products with this matrix; null if there is none.
    ggml_tensor * scale_of(const ggml_tensor * matrix) const {
        const auto it = scales_.find(matrix);
        return it != scales_.end() ? it->second : nullptr;
    }

  private:
    void bind();
    void bind_heads();
    void bind_stacks();
    void add_up_confidence();
    void bound_values();
    // `name`.weight, and the factor `name`.scale if the file has it.
    ggml_tensor * take_matrix(const std::string & name, std::vector<int64_t> shape,
                              bool required = true);

    conv_weights take_conv(const std::string & name);

    draft_tensors tensors_;
    ggml_tensor * confidence_ = nullptr;       // f32 [n_embd + rank], in host memory
    ggml_tensor * confidence_bias_ = nullptr;  // f32 [1]
    std::map<const ggml_tensor *, ggml_tensor *> scales_;
};

}  // namespace dflash
