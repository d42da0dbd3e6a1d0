#pragma once

#include <tuple>

#include "draft_cache.h"
#include "draft_scratch.h"
#include "ggml-cpp.h"
#include "heads_weights.h"
#include "host_mirror.h"
#include "tap_store.h"

namespace dflash {

// The fixed sizes of one graph of the heads.
struct heads_bucket {
    int n_streams;  // drafts: one for each of the first n_streams sequences; 0: rows only
    int n_rows;     // tokens whose keys and values go to the cache; unused ones to the spare cell
    int n_kv;       // cells that attention reads
    int n_draft;    // tokens of each draft

    // Rows that read a token and the target's state before it: those, and the anchors.
    int n_read() const { return n_rows + n_streams; }
    int n_firsts() const { return n_streams > 0 ? n_streams : 1; }
    // Rows in all: a draft's first step is that of its anchor.
    int n_all() const { return n_read() + n_streams * (n_draft > 0 ? n_draft - 1 : 0); }

    bool operator<(const heads_bucket & o) const {
        return std::tie(n_streams, n_rows, n_kv, n_draft) <
               std::tie(o.n_streams, o.n_rows, o.n_kv, o.n_draft);
    }
};

// What a graph computes with. `kept`, f32 [n_embd, n_seq + 1]: the target's state after the last
// token of each sequence, which is read with its next one; the last row is for what nobody needs.
struct heads_parts {
    const heads_weights & weights;
    const draft_cache & cache;
    const tap_store & store;
    ggml_tensor * kept;
    ggml_tensor * ids;  // i32 [chunk, chunks]: those of the rows of the output head, in order
    ggml_backend_t backend;
    draft_scratch & scratch;
};

// One static ggml graph of a head of the target's file. It puts tokens and the target's states into
// the head's cache, then drafts a chain for each stream: each step reads the best token of the step
// before and the head's own state after it, and looks up the token's embedding on the device.
//
// The method is that of DeepSeek-V3 (2024, arXiv 2412.19437). A step's layer is gated attention,
// and a dense feed-forward part or a mixture, as Qwen3.5's, or attention without a gate, as GLM's.
class heads_graph {
  public:
    // Throws backend_error when the backend lacks an operation or the room.
    heads_graph(const heads_parts & parts, const heads_bucket & bucket);

    // Where to write the inputs before `compute`. What is not written keeps its value.
    int32_t * tokens() const { return inputs_.of<int32_t>(tokens_); }              // [n_read]
    int32_t * stored_cells() const { return inputs_.of<int32_t>(stored_cells_); }  // [n_read]
    // [n_firsts]: the rows that read what is kept, of which sequences, the cells in the store of
    // what is kept next, and where it goes
    int64_t * first_rows() const { return inputs_.of<int64_t>(first_rows_); }
    int32_t * first_seqs() const { return inputs_.of<int32_t>(first_seqs_); }
    int32_t * last_cells() const { return inputs_.of<int32_t>(last_cells_); }
    int64_t * last_seqs() const { return inputs_.of<int64_t>(last_seqs_); }
    int32_t * positions() const { return inputs_.of<int32_t>(positions_); }  // [n_all]
    int64_t * cells() const { return inputs_.of<int64_t>(cells_); }          // [n_all]
    ggml_fp16_t * mask() const { return inputs_.of<ggml_fp16_t>(mask_); }  // [n_draft, streams, kv]

    // Uploads the inputs, computes, and waits for the end.
    void compute();

    // After `compute`: the best token of a step, and its log-probability. Throws backend_error if
    // the output is not a number.
    void read(int step, int stream, int32_t * id, float * logprob) const;

    const heads_bucket bucket;

  private:
    void create_inputs();
    void build();
    void allocate();
    ggml_tensor * norm(ggml_tensor * x, ggml_tensor * weight) const;
    // bias: may be null, like the weight of a norm.
    ggml_tensor * product(ggml_tensor * weight, ggml_tensor * x,
                          ggml_tensor * bias = nullptr) const;
    ggml_tensor * rope(ggml_tensor * x, int first) const;
    ggml_tensor * states_before();
    ggml_tensor * joined(ggml_tensor * ids, ggml_tensor * states) const;
    void store(ggml_tensor * x, int first);
    ggml_tensor * attention(int step, ggml_tensor * both, int first);
    ggml_tensor * feed_forward(ggml_tensor * x) const;
    ggml_tensor * experts(ggml_tensor * x) const;
    void draft(ggml_tensor * x);
    ggml_tensor * best(ggml_tensor * logits);

    const heads_parts parts_;
    const heads_params & p_;

    host_mirror inputs_;
    ggml_tensor * tokens_ = nullptr;
    ggml_tensor * stored_cells_ = nullptr;
    ggml_tensor * first_rows_ = nullptr;
    ggml_tensor * first_seqs_ = nullptr;
    ggml_tensor * last_cells_ = nullptr;
    ggml_tensor * last_seqs_ = nullptr;
    ggml_tensor * positions_ = nullptr;
    ggml_tensor * cells_ = nullptr;
    ggml_tensor * mask_ = nullptr;  // null without drafts

    ggml_context_ptr nodes_;
    ggml_cgraph * graph_ = nullptr;
    std::vector<ggml_tensor *> ids_;   // i32 [n_streams], of each step
    std::vector<ggml_tensor *> sums_;  // f32 [1, n_streams]: one over the best one's probability
    host_mirror results_;
};

}  // namespace dflash
