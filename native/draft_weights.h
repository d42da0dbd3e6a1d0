#pragma once

#include <map>
#include <string>

#include "draft_params.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

struct draft_layer {
    ggml_tensor * attn_norm = nullptr;
    ggml_tensor * attn_q = nullptr;
    ggml_tensor * attn_k = nullptr;
    ggml_tensor * attn_v = nullptr;
    ggml_tensor * attn_output = nullptr;
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
    draft_weights(const std::string & path, const draft_params & params, ggml_backend_dev_t device);

    const draft_params params;
    ggml_tensor * fc = nullptr;        // [n_taps * n_embd, n_embd]
    ggml_tensor * fc_norm = nullptr;   // RMSNorm after fc
    ggml_tensor * out_norm = nullptr;  // RMSNorm before the head
    ggml_tensor * rope_freqs = nullptr;
    ggml_tensor * embedding = nullptr;  // the drafter's own, in host memory; null: the target's
    ggml_tensor * head = nullptr;       // the drafter's own; null: the target's
    std::vector<draft_layer> layers;

    // K and V of all layers in one product, for injected rows; null if types differ.
    ggml_tensor * all_kv = nullptr;       // [n_embd, 2 kv, n_layer]
    ggml_tensor * all_kv_bias = nullptr;  // f32 [2 kv, 1, n_layer], optional
    ggml_tensor * all_k_norm = nullptr;   // f32 [head_dim, 1, 1, n_layer]

  private:
    void create(const ggml_context * file, const gguf_context * gguf);
    void add(ggml_context * home, const ggml_tensor * shape, const std::string & name);
    void stack_all(const ggml_context * file);
    bool stack(const ggml_context * file, const std::vector<std::string> & names);
    void bind();
    void bind_stacks();
    void check_data(const std::string & path, const gguf_context * gguf) const;
    void read(const std::string & path, const gguf_context * gguf);
    // A tensor of one dimension must be of floats, one of two of any type that products take.
    ggml_tensor * take(const std::string & name, std::vector<int64_t> shape, bool required = true);

    std::map<std::string, int64_t> sources_;  // index in the file of each tensor's data
    std::map<std::string, ggml_tensor *> unbound_;
    ggml_context_ptr device_tensors_;
    ggml_context_ptr host_tensors_;
    ggml_backend_buffer_ptr device_buffer_;
    ggml_backend_buffer_ptr host_buffer_;
};

}  // namespace dflash
