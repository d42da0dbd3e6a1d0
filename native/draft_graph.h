#pragma once

#include <tuple>
#include <vector>

#include "draft_cache.h"
#include "draft_weights.h"
#include "ggml-cpp.h"
#include "target_tensors.h"

namespace dflash {

// The fixed sizes of one draft graph. Graphs of equal size are the same graph, so that backends
// which record graphs (CUDA) replay them.
struct draft_bucket {
    int n_streams;  // blocks: one for each of the first n_streams sequences; 0: inject only
    int n_rows;     // rows of features to inject; what is not used goes to the spare cell
    int n_kv;       // cells that attention looks at
    int n_draft;    // positions p+1 .. p+n_draft of each block that go through the head
    int top_k;

    bool operator<(const draft_bucket & o) const { return key() < o.key(); }

  private:
    std::tuple<int, int, int, int, int> key() const {
        return {n_streams, n_rows, n_kv, n_draft, top_k};
    }
};

// Faster operations that a draft graph may use; it does so only where its backend has them.
struct draft_capabilities {
    bool flash_attention = true;
    bool top_k = true;
};

// One static ggml graph: injects rows of features into the drafter's cache, then denoises a block
// per sequence over it. Inputs lie in a buffer of their own, so that what does not change between
// rounds (the mask embeddings) is uploaded once.
class draft_graph {
  public:
    // Throws backend_error when the backend lacks an operation or the room.
    draft_graph(const draft_weights & weights, const target_tensors & target,
                const draft_cache & cache, ggml_backend_t backend, const draft_bucket & bucket,
                const draft_capabilities & allowed = {});

    void compute();

    draft_bucket bucket;

    ggml_tensor * features = nullptr;       // f32 [n_taps * n_embd, n_rows]
    ggml_tensor * row_positions = nullptr;  // i32 [n_rows]
    ggml_tensor * row_cells = nullptr;      // i64 [n_rows]

    // Null when the bucket has no blocks.
    ggml_tensor * block = nullptr;            // f32 [n_embd, block_size, n_streams]: embeddings
    ggml_tensor * block_positions = nullptr;  // i32 [block_size * n_streams]
    ggml_tensor * block_cells = nullptr;      // i64 [block_size * n_streams]
    ggml_tensor * mask = nullptr;             // f16 [n_kv, block_size, 1, n_streams]
    ggml_tensor * sliding_mask = nullptr;     // the same; null when no layer has a window

    // Results, rows ordered by stream, then position. `ids` and `logprobs` are null where top-k is
    // not allowed or the backend has none for this vocabulary: `logits` then holds whole rows.
    ggml_tensor * ids = nullptr;       // i32 [top_k, n_draft * n_streams], in no order
    ggml_tensor * logprobs = nullptr;  // f32 [1, top_k, n_draft * n_streams], of ids
    ggml_tensor * logits = nullptr;    // f32 [n_vocab, n_draft * n_streams], capped

  private:
    void create_inputs();
    void build();
    void allocate();
    ggml_tensor * norm(ggml_tensor * x, ggml_tensor * weight) const;
    ggml_tensor * project(ggml_tensor * x, ggml_tensor * weight, ggml_tensor * bias) const;
    ggml_tensor * rope(ggml_tensor * x, ggml_tensor * positions) const;
    void store(int layer, ggml_tensor * x, ggml_tensor * positions, ggml_tensor * cells);
    ggml_tensor * attention(int layer, ggml_tensor * q);
    ggml_tensor * feed_forward(int layer, ggml_tensor * x) const;
    void output(ggml_tensor * x);
    ggml_tensor * capped(ggml_tensor * x) const;
    bool supports(const ggml_tensor * op) const { return ggml_backend_supports_op(backend_, op); }

    const draft_weights & weights_;
    const target_tensors & target_;
    const draft_cache & cache_;
    ggml_backend_t backend_;
    draft_capabilities allowed_;
    ggml_context_ptr inputs_;
    ggml_backend_buffer_ptr input_buffer_;
    ggml_context_ptr nodes_;
    ggml_gallocr_ptr allocator_;
    ggml_cgraph * graph_ = nullptr;
};

}  // namespace dflash
