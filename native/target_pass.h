#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ggml-cpp.h"
#include "llama.h"
#include "tap_store.h"

namespace dflash {

// One row of a batch for the target.
struct batch_row {
    int32_t token;
    int32_t position;
    int32_t seq;
    bool output;  // its logits are wanted
    // Of llama.cpp's, those that it bears; it attends to the cells of the first. None: that of its
    // sequence.
    std::vector<int32_t> ids = {};
};

// Passes of a target through its context. What a pass puts out stays on the target's device: the
// likeliest token of each output row is found there, the inputs of tapped layers go into a store,
// and logits come to the host row by row, for those who need them.
//
// The way in is llama.cpp's interface for samplers on the backend: while it builds its graph it
// calls a sampler of ours for each sequence, which adds nodes to the graph. So the context must be
// freed first, then this.
class target_pass {
  public:
    // n_branches: ids of llama.cpp's that each sequence has. layers: whose inputs to store, the
    // residual streams after the layers before. in_graph: false for a model whose batches llama.cpp
    // may split, which must then have no taps; all logits of a pass then come to the host. Throws
    // std::invalid_argument for a layer outside 1 .. n_layer - 1, backend_error without room.
    target_pass(llama_context * ctx, int n_seq, int n_batch, std::vector<int32_t> layers,
                int n_stored, bool in_graph, int n_branches = 1);
    ~target_pass();

    target_pass(const target_pass &) = delete;
    target_pass & operator=(const target_pass &) = delete;

    // Status of llama_decode; 0: done, and the device idle. Throws backend_error when the model's
    // graph lacks a layer to tap, or does not take all rows at once.
    int decode(const std::vector<batch_row> & rows);

    // Plain greedy decoding of some sequences, n_steps times: each row's likeliest token is the
    // next row. Ends early after a step in which some sequence has come to an end of text or to
    // logits that are not finite. Appends the tokens to out, step by step. Status as `decode`.
    int decode_ahead(std::vector<batch_row> rows, int n_steps, std::vector<int32_t> & out);

    // Of the last pass, by output row: the likeliest tokens; among equals the lowest id on the CPU,
    // always the same one on a GPU. -1 where the logits are not finite numbers.
    const std::vector<int32_t> & best() const { return best_; }

    // Logits of an output row of the last pass, [n_vocab].
    void logits(int output_row, float * out);

    // The k largest of these, largest first, equals by id. Throws backend_error where one of the
    // logits is a NaN or the largest is not finite.
    void candidates(int output_row, int k, int32_t * ids, float * logits);

    int n_vocab() const { return n_vocab_; }
    int n_outputs() const { return n_outputs_; }
    int64_t n_rebuilds() const { return n_rebuilds_; }  // of the target's graph, so far
    tap_store * store() const { return store_.get(); }
    int64_t first_stored() const { return first_stored_; }  // the store's number of the first row

  private:
    struct door;  // the sampler's side

    void build(ggml_context * nodes, ggml_cgraph * graph, ggml_tensor * logits);
    void check(const batch_row & row) const;
    void find_best();
    const float * row_on_host(int output_row);

    llama_context * ctx_;
    int32_t n_seq_;
    int32_t n_ids_;
    int n_vocab_;
    int n_embd_;
    std::vector<int32_t> layers_;
    bool in_graph_;
    bool on_host_ = true;  // the logits
    std::unique_ptr<tap_store> store_;
    std::vector<llama_sampler *> chains_;

    // Of the graph that llama.cpp has built last; it owns the tensors.
    ggml_tensor * graph_logits_ = nullptr;
    ggml_tensor * graph_best_ = nullptr;
    int64_t n_tapped_ = 0;  // rows of a tapped layer
    bool is_built_ = false;
    std::string missing_;
    int64_t n_rebuilds_ = 0;

    ggml_backend_buffer_ptr staged_;  // a row of logits, in memory that the device writes to
    int n_outputs_ = 0;
    int64_t first_stored_ = 0;
    std::vector<int32_t> best_;
};

}  // namespace dflash
