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
// Position by position, that is a few small kernels for each, and the table of the head is read as
// often. With rounds of guesses it is done for all positions at once: the tokens before are
// guessed, and the best tokens after them are the guesses of the next round. The first guess is
// what the logits say by themselves. After n rounds the first n tokens are exact, and all of them
// if the last round has changed none.
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
    void create_memory(const head_parts & parts);
    void place_logits(const head_parts & parts);
    ggml_tensor * of_tokens_before(const head_parts & parts, ggml_tensor * before) const;
    ggml_tensor * best_of(const head_parts & parts, ggml_tensor * rows) const;
    void follow_best(const head_parts & parts) const;
    ggml_tensor * follow_guesses(const head_parts & parts) const;
    void build_steps(const head_parts & parts, ggml_tensor * followed, ggml_tensor * scaled);
    void read_chains(ggml_backend_t backend, const std::vector<int32_t> & anchors,
                     const draft_rows & out);
    void read_lattices(const std::vector<int32_t> & anchors, const draft_rows & out) const;
    draft_lattice lattice_of(int stream) const;
    void weigh(int stream, int position, int32_t before, float * logprobs, int k) const;

    const draft_weights * weights_ = nullptr;
    int n_draft_ = 0;
    int n_streams_ = 0;
    int top_k_ = 0;
    bool is_guessed_ = false;
    draft_output output_;                 // of chains
    draft_candidates candidates_;         // of trees
    ggml_tensor * raw_ = nullptr;         // f32 [k, rows]: the candidates' logits, not scaled
    ggml_tensor * alone_ = nullptr;       // the same without what the token before is worth; may be
                                          // null
    ggml_tensor * steps_ = nullptr;       // f32 [k, k, rows after the first position]; may be null
    ggml_tensor * confidence_ = nullptr;  // f32 [1, rows]: what the state adds; may be null
    host_results results_;

    // Rows of logits are searched in chunks: an argmax of whole rows would keep little of a GPU
    // busy.
    int64_t chunk_size_ = 0;
    ggml_context_ptr constants_;
    ggml_backend_buffer_ptr buffer_;
    ggml_tensor * table_ = nullptr;  // f32 [chunk_size, chunks]: the tokens of each chunk
    char * found_ = nullptr;         // memory for the tokens of one chunk of each row

    // Of all graphs: for the logits, and for all rows of them but those of the last position.
    ggml_backend_buffer_t memory_ = nullptr;
    char * guessed_ = nullptr;
};

}  // namespace dflash
