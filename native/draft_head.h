#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "draft_lattice.h"
#include "draft_output.h"
#include "draft_scratch.h"
#include "draft_weights.h"
#include "ggml-backend.h"

namespace dflash {

// What the end of a draft graph is built of. Rows are ordered by position, then by stream.
struct head_parts {
    ggml_context * nodes;
    ggml_cgraph * graph;
    ggml_backend_t backend;
    draft_scratch & scratch;
    const draft_weights & weights;
    int n_draft;    // drafted positions
    int n_streams;  // sequences
    int top_k;
    selection wanted;
    int n_rounds;           // of guesses, see dspark_head; 0: none
    ggml_tensor * states;   // f32 [n_embd, rows], normed
    ggml_tensor * logits;   // f32 [n, rows], neither scaled nor capped
    ggml_tensor * anchors;  // f32 [rank, n_streams]: the anchors' rows of `anchor_table`, or null

    int64_t n_rows() const { return int64_t{n_draft} * n_streams; }
};

// What a family of drafters makes of the states of its drafted positions. One file per family,
// besides the simplest.
class draft_head {
  public:
    virtual ~draft_head() = default;

    // Throws backend_error if the backend lacks an operation or the room.
    virtual void build(const head_parts & parts) = 0;

    // Waits for the graph. anchors: [n_streams]. Writes rows of the output head for [n_streams,
    // n_draft, k], and the rest of `draft_rows` accordingly. Throws backend_error if the output is
    // not a number.
    virtual void read(ggml_backend_t backend, const std::vector<int32_t> & anchors,
                      const draft_rows & out) = 0;
};

// The one of this drafter's family, and those that have a file.
std::unique_ptr<draft_head> make_head(const draft_params & params);
std::unique_ptr<draft_head> make_dspark_head();
std::unique_ptr<draft_head> make_dflash2_head();

// How many candidates the head gives per position if asked for so many.
int head_top_k(const draft_params & params, int top_k);

// Logits as in training: scaled, then softly capped.
ggml_tensor * scaled_logits(ggml_context * nodes, const draft_params & params,
                            ggml_tensor * logits);
float scaled_logit(const draft_params & params, float logit);

// The scores that a table of rank values gives the candidates of a position after those of the one
// before, f32 [k of them, k of those, n]. after, before: f32 [rank, k, n].
ggml_tensor * step_scores(ggml_context * nodes, ggml_tensor * after, ggml_tensor * before);

}  // namespace dflash
