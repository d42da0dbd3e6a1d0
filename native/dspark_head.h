#pragma once

#include "draft_candidates.h"
#include "draft_head.h"
#include "draft_output.h"
#include "ggml-cpp.h"
#include "host_results.h"

namespace dflash {

// DSpark: a Markov head adds to the logits of each position what the token before it is worth,
// after[token] * before[token before]. The graph follows the best token from position to position.
// For trees it also scores the steps between the best candidates of adjacent positions.
//
// A head for the confidence says how likely the target accepts a position after its token before.
// Where there is one, that is the probability of the best candidate, and the others share the rest
// as the logits share it out.
class dspark_head : public draft_head {
  public:
    size_t n_nodes(int n_draft) const override;
    void build(const head_parts & parts) override;
    void read(ggml_backend_t backend, const std::vector<int32_t> & anchors,
              const draft_rows & out) override;

  private:
    void create_constants(const head_parts & parts, bool is_scaled);
    ggml_tensor * of_token_before(const head_parts & parts, ggml_tensor * before) const;
    ggml_tensor * best_of(const head_parts & parts, ggml_tensor * rows) const;
    void follow_best(const head_parts & parts) const;
    void build_steps(const head_parts & parts, ggml_tensor * scaled);
    void read_chains(ggml_backend_t backend, const std::vector<int32_t> & anchors,
                     const draft_rows & out);
    void read_lattices(const std::vector<int32_t> & anchors, const draft_rows & out) const;
    draft_lattice lattice_of(int stream) const;
    void weigh(int stream, int position, int32_t before, float * logprobs, int k) const;

    const draft_weights * weights_ = nullptr;
    int n_draft_ = 0;
    int n_streams_ = 0;
    int top_k_ = 0;
    draft_output output_;                 // of chains
    draft_candidates candidates_;         // of trees
    ggml_tensor * raw_ = nullptr;         // f32 [k, rows]: the candidates' logits, not scaled
    ggml_tensor * steps_ = nullptr;       // f32 [k, k, rows after the first position]; may be null
    ggml_tensor * confidence_ = nullptr;  // f32 [1, rows]: what the state adds; may be null
    host_results results_;

    // Rows of logits are searched in chunks: an argmax of whole rows would keep little of a GPU
    // busy.
    int64_t chunk_size_ = 0;
    ggml_context_ptr constants_;
    ggml_backend_buffer_ptr buffer_;
    ggml_tensor * tokens_ =
        nullptr;  // i32 [1, chunk_size, chunks of all streams]: 0, 1, ... of each
    ggml_tensor * columns_ = nullptr;  // f32 [rank, n, n, n_streams], n rows joined: 1 where equal
    char * found_ = nullptr;           // memory for the best token of each chunk
};

}  // namespace dflash
