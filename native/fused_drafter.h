#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bf16_weights.h"
#include "draft_cache.h"
#include "draft_graph.h"
#include "draft_mask.h"
#include "draft_scratch.h"
#include "draft_sizes.h"
#include "draft_weights.h"
#include "ggml-cpp.h"
#include "llama.h"
#include "tap_store.h"
#include "target_tensors.h"
#include "thread_pool.h"

namespace dflash {

// Context features, n rows of n_taps * n_embd: either on the host, row by row, or in the target's
// store, given by their numbers there.
struct feature_rows {
    int n = 0;
    const float * host = nullptr;
    std::vector<int64_t> stored = {};
};

// One block to denoise: the features of the rows accepted since the last draft of this sequence,
// and the anchor at the position after them.
struct draft_request {
    int seq = 0;
    feature_rows features;
    int32_t anchor = 0;
};

// Drafts of positions 1 .. n_draft for each request: tokens and log-probabilities, [n_requests,
// n_draft, top_k], best first.
struct drafts {
    size_t n_draft = 0;
    std::vector<int32_t> ids;
    std::vector<float> logprobs;
    // [n_requests, n_draft, top_k, top_k]: of each candidate after each one of the position before;
    // empty if positions do not depend on one another, or only chains are wanted
    std::vector<float> steps;
};

// A loaded drafter: its weights, its cache for N sequences, and the graphs over them. Not thread
// safe. The model whose embedding and head it shares must outlive it.
class fused_drafter {
  public:
    // params: what the keys of the file at `path` say.
    // store: that of the target, on the same device; null if all features come from the host.
    // draft_window: how many of a sequence's last rows drafts look at; 0: all.
    // threads: those of the target, for the CPU. Without them, or if they are too few, ggml starts
    // threads for each graph.
    // Throws file_error for a file that the draft graph cannot run or that does not fit the target,
    // backend_error if there is no room, std::invalid_argument for a number out of range.
    fused_drafter(const llama_model * model, std::shared_ptr<const tap_store> store,
                  const std::string & path, const draft_params & params, int n_seq, int n_ctx,
                  int top_k, int n_threads, const draft_capabilities & allowed = {},
                  int draft_window = 0, std::shared_ptr<const thread_pool> threads = nullptr);

    fused_drafter(const fused_drafter &) = delete;
    fused_drafter & operator=(const fused_drafter &) = delete;

    const draft_params & params() const { return weights_.params; }
    int n_vocab() const { return n_vocab_; }
    int top_k() const { return top_k_; }
    int length(int seq) const;
    int64_t n_builds() const { return n_builds_; }  // draft graphs made so far
    // Of the weights on the device, a copy of the target's head included.
    size_t n_weight_bytes() const { return weights_.n_bytes() + (head_ ? head_->n_bytes() : 0); }
    size_t n_cache_bytes() const { return cache_.n_bytes(); }
    // Rounds in which a Markov head guesses the tokens before; 0: as many as suit the device. For
    // tests, before the first draft.
    int n_rounds() const { return allowed_.n_rounds; }
    void set_n_rounds(int n) { allowed_.n_rounds = n; }

    // Turns rows of features into K and V, from position length(seq) on.
    // Throws context_full_error, and backend_error, also for features from the host that are not
    // finite. The cache is then unchanged, except for rows before the window.
    void inject(int seq, const feature_rows & features);

    // Injects and starts to denoise all requests in one graph. All features must come from the
    // host, or all from the store. `read` must follow. Any other call that changes the cache first
    // gives the draft up. Throws as `inject` does.
    void begin(const std::vector<draft_request> & requests, int n_draft);

    // Waits for the drafts of `begin`. Throws backend_error if the drafter's output is not a
    // number. With a store, whose features are not checked, the cache is then empty.
    drafts read();

    void truncate(int seq, int length);
    void copy(int from, int to, int length);

    // The rows of a sequence as bytes, [n_saved_bytes], and back. `restore` throws as draft_cache
    // does.
    size_t n_saved_bytes(int seq) const;
    void save(int seq, uint8_t * out) const;
    void restore(int seq, const uint8_t * saved, size_t n_bytes);

    // How many rows a draft after the first `length` ones would look at.
    int n_visible(int seq, int length) const;

  private:
    void check_sequence(int seq) const;
    void check_target_fits() const;
    void check_head_fits() const;
    void copy_head();
    void check_token(int32_t token) const;
    struct graph_slot;

    // What all requests of a draft need together.
    struct demand {
        int n_streams = 0;
        int64_t n_rows = 0;
        int64_t longest = 0;  // the most rows of a sequence, the new ones included
        bool stored = false;  // features come from the store
    };

    // A draft that the device is working on. `lengths`: those of the cache before it.
    struct pending_draft {
        draft_graph * graph;
        std::vector<draft_request> requests;
        std::vector<int> lengths;
    };

    draft_graph & launch(std::vector<draft_request> & requests, const demand & wanted, int n_draft);
    demand check_requests(const std::vector<draft_request> & requests, int n_draft) const;
    void abandon();
    void check_features(const feature_rows & features) const;
    graph_slot & graph(const draft_bucket & bucket);
    void inject_rows(int seq, const feature_rows & features);
    void fill_rows(draft_graph & g, const std::vector<draft_request> & requests);
    void fill_blocks(graph_slot & slot, const std::vector<draft_request> & requests);
    void compute(draft_graph & graph);
    void embed(int32_t token, std::vector<float> & row) const;

    // In the order that they must outlive each other; graphs go first.
    target_tensors target_;
    std::shared_ptr<const tap_store> store_;
    std::shared_ptr<const thread_pool> threads_;
    int n_threads_;
    ggml_backend_ptr backend_;
    draft_weights weights_;
    std::optional<bf16_copy> head_;  // of the target's, if that pays
    draft_cache cache_;
    draft_sizes sizes_;
    int n_vocab_ = 0;
    int top_k_;
    draft_capabilities allowed_;
    std::vector<float> mask_row_;
    struct graph_slot {
        std::unique_ptr<draft_graph> graph;
        std::optional<draft_mask> mask;
        std::optional<draft_mask> sliding_mask;
        uint64_t last_use = 0;
    };
    draft_scratch scratch_;
    std::map<draft_bucket, graph_slot> graphs_;
    uint64_t clock_ = 0;
    int64_t n_builds_ = 0;
    std::optional<pending_draft> pending_;
};

}  // namespace dflash
