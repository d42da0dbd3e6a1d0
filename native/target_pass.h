#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "candidate_search.h"
#include "draw.h"
#include "ggml-cpp.h"
#include "llama-cpp.h"
#include "state_replay.h"
#include "tap_store.h"

namespace dflash {

// One row of a batch for the target.
struct batch_row {
    int32_t token;
    int32_t position;
    int32_t seq;
    bool output;  // its logits are wanted
    // The llama.cpp ids of the row. It attends to the cells of the first one. Empty: the id of its
    // sequence.
    std::vector<int32_t> ids = {};
};

// Passes of a target through its context. The output of a pass stays on the target's device: the
// likeliest token of each output row is found there, the inputs of tapped layers go into a store,
// and logits come to the host row by row, on request.
//
// This uses llama.cpp's interface for samplers on the backend: while llama.cpp builds its graph, it
// calls a sampler of ours for each sequence, which adds nodes to the graph. So the context must be
// freed before this object.
class target_pass {
  public:
    // n_branches: how many llama.cpp ids each sequence has. layers: the layers whose inputs, the
    // residual streams, are stored. in_graph: false for a model whose batches llama.cpp may split.
    // It must have no taps, and all logits of a pass come to the host. Layer n_layer stands for
    // what the heads that predict further tokens read (llama.cpp's h_nextn), where the model has
    // any. Throws std::invalid_argument for a layer that is not there, backend_error if there is no
    // room.
    //
    // replay: takes back rows of recurrent states, or null. It needs in_graph.
    target_pass(llama_context * ctx, int n_seq, std::vector<int32_t> layers, int n_stored,
                bool in_graph, int n_branches = 1, std::unique_ptr<state_replay> replay = nullptr);

    // From now on a draw comes to the same whatever is drawn from other rows. Call it before the
    // first pass.
    void draw_alike() { search_.sums_alike = true; }

    target_pass(const target_pass &) = delete;
    target_pass & operator=(const target_pass &) = delete;

    // Status of llama_decode; 0: done, and the device is idle. Throws backend_error if the model's
    // graph lacks a layer to tap, or does not take all rows at once.
    //
    // states: the hidden state that comes with each row's token, [rows][n_embd], in a context of
    // such heads; else null. Of some heads only the rows with an output are stored, in their order.
    int decode(const std::vector<batch_row> & rows, const float * states = nullptr);

    // A pass over n rows of one sequence that are given as what enters the first layer, not as
    // tokens: rows has [n][llama_model_n_embd_inp]. positions has one for each row; with M-RoPE
    // four, all first ones in front. Not is_causal: each row sees all of them. No row has logits.
    // Status as `decode`.
    int decode_embeddings(const float * rows, int n, std::vector<int32_t> positions, int32_t seq,
                          bool is_causal);

    // Decodes some sequences for n_steps: what is drawn from each row is the next row. It stops
    // early after a step in which a sequence comes to an end of text, or something else than a
    // token is drawn. Appends what is drawn to out, step by step. Returns the status as `decode`.
    //
    // draws: how each sequence draws, as `draw` takes it. given: empty, or the tokens to take in
    // place of those that are drawn, step by step. The work is the same.
    int decode_ahead(std::vector<batch_row> rows, int n_steps,
                     const std::vector<token_draw *> & draws, const std::vector<int32_t> & given,
                     std::vector<int32_t> & out);

    // Whether `keep` can take back rows of the last pass.
    bool can_keep() const { return can_keep_; }

    // A sequence of the last pass keeps its first n_kept rows, with the state after them. See
    // `state_replay`.
    void keep(int32_t seq, int32_t n_kept);
    void start_replay();
    void wait();

    // The likeliest token of an output row of the last pass; of equal ones the lowest id on the
    // CPU, always the same one on a GPU. -1 if the logits are not finite numbers.
    int32_t best(int output_row);

    // Draws a token from an output row of the last pass and settles it. Null: its likeliest token.
    // Fetches no more of the row than it needs. `token_draw` says what may come in place of a
    // token. A first draw also looks for NaNs that a device passes over: damaged weights put them
    // into each row, and looking at all of a row takes longer than a small model's step.
    int32_t draw(token_draw * how, int output_row);

    // Seconds of all draws so far, and how many of them took the whole row.
    double draw_s() const { return draw_s_; }
    int64_t n_whole_rows() const { return n_whole_rows_; }

    // Logits of an output row of the last pass, [n_vocab].
    std::vector<float> logits(int output_row);

    // The k largest logits of an output row, largest first, equal ones by id. If not all equal ones
    // fit, the host takes the lowest ids, a device any of them. Throws backend_error if one of the
    // logits is a NaN or the largest is not finite.
    //
    // On a GPU the first call finds them for all rows at once, there, and copies them. Where the
    // logits are in host memory, reading that one row costs less than another graph.
    void candidates(int output_row, int k, std::vector<int32_t> & ids, std::vector<float> & logits);

    // log(sum(exp(x))) over an output row.
    double log_sum(int output_row);

    // Search for candidates with a graph on the CPU, too: for tests.
    bool search_on_cpu = false;

    const llama_context * context() const { return ctx_; }
    int n_vocab() const { return n_vocab_; }
    int n_embd() const { return n_embd_; }
    int n_outputs() const { return n_outputs_; }
    int64_t n_rebuilds() const { return n_rebuilds_; }  // of the target's graph, so far
    // Shared with the drafters that read it. Null: no layers are tapped.
    const std::shared_ptr<tap_store> & store() const { return store_; }
    int64_t n_tapped() const { return n_tapped_; }          // rows that the last pass has stored
    int64_t first_stored() const { return first_stored_; }  // the store's number of the first row

  private:
    struct callbacks;

    void build(ggml_context * nodes, ggml_cgraph * graph, ggml_tensor * logits);
    void check(const batch_row & row) const;
    void check_size(size_t n) const;
    int run(const llama_batch & batch, int n_outputs);
    void check_output(int output_row) const;
    const float * row_on_host(int output_row);
    bool search(int output_row, int k, float temperature = 0.0f);
    bool find_candidates(int output_row, int k, int32_t * ids, float * logits);
    int32_t draw_from(token_draw & how, int output_row);
    int32_t draw_best(const token_draw & how, int output_row);
    int32_t draw_from_sums(token_draw & how, int output_row);
    int32_t draw_from_candidates(token_draw & how, int output_row);

    llama_context * ctx_;
    int32_t n_seq_;
    int32_t n_ids_;
    int n_vocab_;
    int n_embd_;
    std::vector<int32_t> layers_;
    bool in_graph_;
    bool on_host_ = true;  // the logits
    std::shared_ptr<tap_store> store_;
    std::unique_ptr<state_replay> replay_;
    bool can_keep_ = false;
    std::vector<llama_sampler_ptr> chains_;

    // From the graph that llama.cpp built last, which owns the tensors.
    ggml_tensor * graph_logits_ = nullptr;
    ggml_tensor * graph_best_ = nullptr;
    int64_t n_tapped_ = 0;  // rows of a tapped layer
    bool is_built_ = false;
    std::string missing_;
    int64_t n_rebuilds_ = 0;

    ggml_backend_buffer_ptr staged_;  // a row of logits, in memory that the device writes to
    int n_outputs_ = 0;
    int64_t first_stored_ = 0;
    std::vector<int32_t> best_;  // of all output rows, once a device was asked
    double draw_s_ = 0.0;
    int64_t n_whole_rows_ = 0;

    candidate_search search_;
    int too_many_;                 // so many candidates the device cannot find
    int most_candidates_ = 0;      // that were asked for after the last pass with any
    int most_candidates_now_ = 0;  // after this pass
};

}  // namespace dflash
