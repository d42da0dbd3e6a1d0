#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "draft_cache.h"
#include "draft_graph.h"
#include "draft_weights.h"
#include "ggml-cpp.h"
#include "llama.h"
#include "target_tensors.h"

namespace dflash {

// One block to denoise: the rows of features accepted since the last draft of this sequence, then
// an anchor at the position after them.
struct draft_request {
    int seq = 0;
    const float * features = nullptr;  // [n_rows, n_taps * n_embd], row by row
    int n_rows = 0;
    int32_t anchor = 0;
};

// A drafter file at work: weights, cache of N sequences, and the graphs over them. Not thread safe.
// The model whose embedding and head it shares must outlive it.
class fused_drafter {
  public:
    // Throws file_error for a file that the draft graph cannot run or that does not fit the target,
    // backend_error without room for it, std::invalid_argument for a number out of its range.
    fused_drafter(const llama_model * model, const std::string & path, int n_seq, int n_ctx,
                  int top_k, int n_threads, const draft_capabilities & allowed = {});

    fused_drafter(const fused_drafter &) = delete;
    fused_drafter & operator=(const fused_drafter &) = delete;

    const draft_params & params() const { return weights_.params; }
    int n_vocab() const { return n_vocab_; }
    int top_k() const { return top_k_; }
    int length(int seq) const;
    size_t n_weight_bytes() const { return weights_.n_bytes(); }
    size_t n_cache_bytes() const { return cache_.n_bytes(); }
    std::string device_name() const;

    // Rows of features become K and V at positions length(seq) and on.
    // Throws context_full_error, and backend_error also for features that are not finite; the
    // cache is then as it was.
    void inject(int seq, const float * features, int n_rows);

    // Injects and denoises all requests in one graph. Writes, per request, position 1 .. n_draft
    // and rank, [n_requests, n_draft, top_k] ids and log-probabilities, best first.
    // Throws as `inject` does, and backend_error when the drafter's output is not a number.
    void draft(const std::vector<draft_request> & requests, int n_draft, int32_t * ids,
               float * logprobs);

    void truncate(int seq, int length);
    void copy(int from, int to, int length);

  private:
    void check_sequence(int seq) const;
    void check_target_fits() const;
    void check_token(int32_t token) const;
    draft_graph & graph(const draft_bucket & bucket);
    void inject_rows(int seq, const float * features, int n_rows);
    void upload_rows(draft_graph & g, const std::vector<draft_request> & requests);
    void upload_blocks(draft_graph & g, const std::vector<draft_request> & requests);
    void upload_masks(draft_graph & g, const std::vector<int> & starts);
    void embed(int32_t token, std::vector<float> & row) const;
    void download(draft_graph & g, std::vector<int32_t> & ids, std::vector<float> & logprobs) const;

    // In the order that they must outlive each other; graphs go first.
    target_tensors target_;
    ggml_backend_ptr backend_;
    draft_weights weights_;
    draft_cache cache_;
    int n_vocab_ = 0;
    int top_k_;
    draft_capabilities allowed_;
    std::vector<float> mask_row_;
    struct graph_slot {
        std::unique_ptr<draft_graph> graph;
        uint64_t last_use = 0;
    };
    std::map<draft_bucket, graph_slot> graphs_;
    uint64_t clock_ = 0;
};

}  // namespace dflash
