#pragma once

#include "draft_candidates.h"
#include "draft_head.h"
#include "draft_output.h"
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
    ggml_tensor * of_token_before(const head_parts & parts, ggml_tensor * before) const;
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
};

}  // namespace dflash
