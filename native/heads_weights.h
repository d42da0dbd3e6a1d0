#pragma once

#include <cstdint>

#include "draft_params.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "llama.h"

namespace dflash {

// The numbers of a head: a layer of a target's own file that predicts a further token. Python reads
// them from the keys of the file.
struct heads_params {
    int layer = 0;  // its number in the file
    int n_embd = 0;
    int n_head = 0;
    int n_head_kv = 0;
    int head_dim = 0;
    int n_expert_used = 0;  // 0: no experts
    int n_draft = 0;        // tokens of a draft, at most
    float rms_eps = 1e-6f;
    float expert_scale = 0.0f;  // of the experts' weights; 0: none
    bool is_gated = true;       // attention's output has a gate, made with the queries
    bool by_sigmoid = false;    // the router's chances are sigmoids, else they are a softmax
    bool adds_to_one = true;    // the weights of a row's experts
    rope_params rope;

    int n_embd_kv() const { return n_head_kv * head_dim; }

    // Throws std::invalid_argument for numbers with which no graph can be built.
    void check() const;
};

// A head's tensors. They belong to the llama_model and live as long as it, but for a copy of the
// embeddings, which is made if the device of the output head cannot look up their rows.
class heads_weights {
  public:
    // Throws file_error if the model's head is not one that our graph computes, or not of the sizes
    // that `params` say; backend_error if parts of it are on another device, or without room.
    heads_weights(const llama_model * model, const heads_params & params);

    ggml_backend_dev_t device() const { return device_; }
    int n_vocab() const { return static_cast<int>(embedding->ne[1]); }

    // Makes sure that the backend of `device` can compute with all of them.
    void place(ggml_backend_t backend);

    const heads_params params;
    ggml_tensor * embedding = nullptr;  // [n_embd, n_vocab]
    ggml_tensor * embedding_norm = nullptr;
    ggml_tensor * state_norm = nullptr;
    ggml_tensor * joined = nullptr;  // [2 n_embd, n_embd]: of an embedding, then of a state
    ggml_tensor * attn_norm = nullptr;
    // [n_embd, head_dim * n_head]; with a gate twice as much: of each head q, then the gate
    ggml_tensor * attn_q = nullptr;
    ggml_tensor * attn_k = nullptr;
    ggml_tensor * attn_v = nullptr;
    ggml_tensor * attn_q_bias = nullptr;  // optional, like the next four
    ggml_tensor * attn_k_bias = nullptr;
    ggml_tensor * attn_v_bias = nullptr;
    ggml_tensor * attn_q_norm = nullptr;
    ggml_tensor * attn_k_norm = nullptr;
    ggml_tensor * attn_output = nullptr;
    ggml_tensor * post_norm = nullptr;
    // Of a dense layer, or of the expert that every token uses. Null: a mixture without one.
    ggml_tensor * ffn_gate = nullptr;
    ggml_tensor * ffn_up = nullptr;
    ggml_tensor * ffn_down = nullptr;
    // Of a mixture; else null.
    ggml_tensor * router = nullptr;
    ggml_tensor * router_bias = nullptr;  // f32 [n_expert], of the choice alone; optional
    ggml_tensor * shared_gate = nullptr;  // f32 [n_embd]; optional
    ggml_tensor * experts_gate = nullptr;
    ggml_tensor * experts_up = nullptr;
    ggml_tensor * experts_down = nullptr;
    ggml_tensor * head_norm = nullptr;
    ggml_tensor * head = nullptr;  // [n_embd, n_vocab]

  private:
    void bind(const llama_model * model);
    void check_shapes() const;

    ggml_backend_dev_t device_ = nullptr;
    ggml_context_ptr copies_;
    ggml_backend_buffer_ptr buffer_;
};

}  // namespace dflash
