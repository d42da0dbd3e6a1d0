#pragma once

#include "draft_scratch.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

// Nodes that find the likeliest tokens of rows of logits on the device, for heads that look up what
// they need of each of them.
class draft_candidates {
  public:
    // logits: f32 [n_vocab, rows]. in_chunks: search the likeliest chunks of each row, which a GPU
    // does faster. Throws backend_error if the backend cannot do it, or lacks the room.
    void build(ggml_context * nodes, ggml_backend_t backend, draft_scratch & scratch,
               ggml_tensor * logits, int k, bool in_chunks);

    ggml_tensor * ids = nullptr;     // i32 [k, rows], in no order
    ggml_tensor * logits = nullptr;  // f32 [k, rows]
    ggml_tensor * sums = nullptr;    // f32 [1, rows]: sum(exp(x - M)), M the largest of the row

  private:
    bool build_in_chunks(ggml_context * c, ggml_backend_t backend, draft_scratch & scratch,
                         ggml_tensor * rows, int k);
    void create_table(ggml_backend_t backend, int64_t size, int64_t n_chunks);

    ggml_context_ptr constants_;
    ggml_backend_buffer_ptr buffer_;
    ggml_tensor * table_ = nullptr;  // f32 [size, n_chunks]: the ids of each chunk
};

}  // namespace dflash
