#pragma once

#include <cstdint>
#include <vector>

#include "draft_scratch.h"
#include "ggml-backend.h"
#include "host_mirror.h"

namespace dflash {

// Where the likeliest tokens are selected, depending on what a backend can do.
enum class selection {
    on_device,
    among_few,  // on the host, in a few chunks of each row: if the device is the host
    on_host,    // on the host, in whole rows
};

// The end of a draft graph: from rows of logits to the likeliest tokens and their
// log-probabilities.
class draft_output {
  public:
    // Throws backend_error if the memory does not suffice.
    void build(ggml_context * nodes, ggml_cgraph * graph, ggml_backend_t backend,
               draft_scratch & scratch, ggml_tensor * logits, int top_k, selection wanted);

    // Waits for the graph. ids and logprobs: [n_streams, positions, top_k], best first, equal ones
    // by id, of rows that are ordered by position, then by stream. If not all equal ones fit, it is
    // always the same ones. Throws backend_error if the output is not a number.
    void read(ggml_backend_t backend, int n_streams, int32_t * ids, float * logprobs);

  private:
    bool build_best(ggml_context * nodes, ggml_backend_t backend, draft_scratch & scratch,
                    ggml_tensor * logits);
    bool build_top_k(ggml_context * nodes, ggml_backend_t backend, ggml_tensor * logits);
    bool build_chunks(ggml_context * nodes, ggml_backend_t backend, draft_scratch & scratch,
                      ggml_tensor * logits, bool on_device);
    void read_best(int64_t row, int32_t * ids, float * logprobs) const;
    void read_top_k(int64_t row, int32_t * ids, float * logprobs) const;
    void read_best_of_few(int64_t row, int32_t * ids, float * logprobs) const;
    void read_chunks(int64_t row, int32_t * ids, float * logprobs) const;
    void read_logits(int64_t row, int32_t * ids, float * logprobs) const;

    int top_k_ = 0;
    int64_t n_rows_ = 0;
    int64_t n_vocab_ = 0;

    // Each row is a number of chunks. Top one:
    int64_t chunk_size_ = 0;
    ggml_tensor * chunks_ = nullptr;      // i32 [rows]: which chunk the best is in
    ggml_tensor * places_ = nullptr;      // i32 [rows]: where in it
    ggml_tensor * normaliser_ = nullptr;  // f32 [1, rows]: one over the probability of the best
    // Top k of a few chunks, with the normaliser
    ggml_tensor * few_ = nullptr;       // i32 [top_k, rows]: the chunks with the largest peaks
    ggml_tensor * few_rows_ = nullptr;  // f32 [chunk_size, top_k, rows]: their logits
    ggml_tensor * best_ = nullptr;      // i32 [top_k, rows]: where the largest are
    ggml_tensor * values_ = nullptr;    // f32 [1, top_k, rows]: the largest
    // Top k of whole rows
    ggml_tensor * ids_ = nullptr;       // i32 [top_k, rows]
    ggml_tensor * logprobs_ = nullptr;  // f32 [1, top_k, rows]
    // Whole rows, which the host searches
    ggml_tensor * logits_ = nullptr;  // f32 [n_vocab, rows]

    host_mirror results_;
};

}  // namespace dflash
