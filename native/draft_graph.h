#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "draft_cache.h"
#include "draft_head.h"
#include "draft_scratch.h"
#include "draft_weights.h"
#include "ggml-cpp.h"
#include "host_mirror.h"
#include "tap_store.h"
#include "target_tensors.h"

namespace dflash {

// The fixed sizes of one draft graph. Graphs of equal size are the same graph, so that backends
// which record graphs (CUDA) replay them.
struct draft_bucket {
    int n_streams;  // blocks: one for each of the first n_streams sequences; 0: inject only
    int n_rows;     // rows of features to inject; unused ones go to the spare cell
    int n_kv;       // cells that attention reads
    int n_draft;    // positions p+1 .. p+n_draft of each block that go through the head
    int top_k;
    bool stored;  // features come from the target's store, not from the host

    bool operator<(const draft_bucket & o) const {
        return std::tie(n_streams, n_rows, n_kv, n_draft, top_k, stored) <
               std::tie(o.n_streams, o.n_rows, o.n_kv, o.n_draft, o.top_k, o.stored);
    }
};

// Faster operations that a draft graph may use, if its backend has them.
struct draft_capabilities {
    bool flash_attention = true;
    bool top_k = true;
    int n_rounds = 0;  // of guesses, see dspark_head; 0: as many as suit the device
    // Whether quantised matrices become bf16; none: if that pays, see bf16_weights.h.
    std::optional<bool> bf16 = std::nullopt;
};

// What a draft graph computes with.
struct draft_parts {
    const draft_weights & weights;
    const target_tensors & target;
    const draft_cache & cache;
    const tap_store * store;              // null: all features come from the host
    const std::vector<float> & mask_row;  // the embedding of the mask token
    ggml_backend_t backend;
    draft_scratch & scratch;
};

// One static ggml graph. It injects rows of features into the drafter's cache, then denoises a
// block per sequence.
class draft_graph {
  public:
    // Throws backend_error when the backend lacks an operation or the room.
    draft_graph(const draft_parts & parts, const draft_bucket & bucket,
                const draft_capabilities & allowed = {});

    // Where to write the inputs before `compute`. What is not written keeps its value.
    float * features() const { return inputs_.of<float>(features_); }  // [n_rows, n_features]
    int32_t * stored_cells() const { return inputs_.of<int32_t>(stored_cells_); }    // [n_rows]
    int32_t * row_positions() const { return inputs_.of<int32_t>(row_positions_); }  // [n_rows]
    // [n_layer, n_rows], cells in the tensors of all layers
    int64_t * row_cells() const { return inputs_.of<int64_t>(row_cells_); }
    float * anchors() const { return inputs_.of<float>(anchors_); }  // [n_streams, n_embd]
    // [n_streams, rank], only if the head looks up the token before
    float * anchor_rows() const { return inputs_.of<float>(anchor_rows_); }
    std::vector<int32_t> anchor_tokens;  // [n_streams]
    // [n_streams, block_size], like the next one, which has cells of one layer
    int32_t * block_positions() const { return inputs_.of<int32_t>(block_positions_); }
    int64_t * block_cells() const { return inputs_.of<int64_t>(block_cells_); }
    // [n_streams, block_size, n_kv]; the second only if a layer has a window
    ggml_fp16_t * mask() const { return inputs_.of<ggml_fp16_t>(mask_); }
    ggml_fp16_t * sliding_mask() const { return inputs_.of<ggml_fp16_t>(sliding_mask_); }

    // Uploads the inputs and computes. Without blocks it waits for the end.
    void compute();

    // After `compute`, with blocks. See draft_head.
    void read(const draft_rows & out) { head_->read(parts_.backend, anchor_tokens, out); }

    const draft_bucket bucket;

  private:
    void create_inputs();
    void create_mask_rows();
    void build();
    void expand_views();
    bool is_on_host() const;
    selection wanted_selection() const;
    int n_rounds() const;
    void check_first_node() const;
    void allocate();
    ggml_tensor * context_features();
    ggml_tensor * norm(ggml_tensor * x, ggml_tensor * weight) const;
    // bias: may be null. is_wide: x may leave the range of f16.
    ggml_tensor * project(ggml_tensor * x, ggml_tensor * weight, ggml_tensor * bias = nullptr,
                          bool is_wide = false) const;
    ggml_tensor * as_weights(ggml_tensor * x, const ggml_tensor * weight) const;
    ggml_tensor * logits_of(ggml_tensor * states) const;
    // Whether parts of a layer are given more than what a norm puts out.
    bool is_convolved() const { return p_.selector.rank > 0; }
    ggml_tensor * values(const draft_layer & l, ggml_tensor * x, ggml_tensor * k) const;
    ggml_tensor * rope(ggml_tensor * x, ggml_tensor * positions) const;
    void inject(ggml_tensor * g);
    void inject_all(ggml_tensor * g);
    ggml_tensor * denoise();
    ggml_tensor * queries(int layer, ggml_tensor * h);
    ggml_tensor * attention(int layer, ggml_tensor * q);
    ggml_tensor * self_attention(int layer, ggml_tensor * h);
    ggml_tensor * feed_forward(int layer, ggml_tensor * x) const;
    template <typename Part>
    ggml_tensor * convolved(const conv_weights & weights, ggml_tensor * x, const Part & part);
    void store(ggml_tensor * k_cache, ggml_tensor * v_cache, ggml_tensor * k, ggml_tensor * v,
               ggml_tensor * cells);
    ggml_tensor * drafted_states(ggml_tensor * x) const;

    const draft_parts parts_;
    const draft_params & p_;
    draft_capabilities allowed_;

    host_mirror inputs_;
    ggml_tensor * features_ = nullptr;         // f32 [n_features, n_rows]
    ggml_tensor * stored_cells_ = nullptr;     // i32 [n_rows]
    ggml_tensor * row_positions_ = nullptr;    // i32 [n_rows * n_layer]
    ggml_tensor * row_cells_ = nullptr;        // i64 [n_rows * n_layer]
    ggml_tensor * anchors_ = nullptr;          // f32 [n_embd, 1, n_streams]
    ggml_tensor * anchor_rows_ = nullptr;      // f32 [rank, n_streams], or null
    ggml_tensor * block_positions_ = nullptr;  // i32 [block_size * n_streams]
    ggml_tensor * block_cells_ = nullptr;      // i64 [block_size * n_streams]
    ggml_tensor * mask_ = nullptr;             // f16 [n_kv, block_size, 1, n_streams]
    ggml_tensor * sliding_mask_ = nullptr;     // the same

    ggml_tensor * mask_rows_ = nullptr;  // f32 [n_embd, block_size - 1, n_streams]
    ggml_context_ptr constants_;
    ggml_backend_buffer_ptr constant_buffer_;

    ggml_context_ptr nodes_;
    ggml_cgraph * graph_ = nullptr;
    std::unique_ptr<draft_head> head_;
};

}  // namespace dflash
