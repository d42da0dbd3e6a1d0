#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "draft_cache.h"
#include "draft_graph.h"
#include "draft_mask.h"
#include "draft_weights.h"
#include "feature_rows.h"
#include "ggml-cpp.h"
#include "llama.h"
#include "tap_store.h"
#include "target_tensors.h"
#include "thread_pool.h"

namespace dflash {

// One block to denoise: the rows of features accepted since the last draft of this sequence, then
// an anchor at the position after them.
struct draft_request {
    int seq = 0;
    feature_rows features;
    int32_t anchor = 0;
};

// A drafter file at work: weights, cache of N sequences, and the graphs over them. Not thread safe.
// The model whose embedding and head it shares must outlive it.
class fused_drafter {
  public:
    // params: what the keys of the file at `path` say.
    // Throws file_error for a file that the draft graph cannot run or that does not fit the target,
    // backend_error without room for it, std::invalid_argument for a number out of its range.
    // store: of the target, on the same device; null where features only come from the host.
    // draft_window: of a sequence's rows, how many drafts look at: the last ones; 0: all.
    // threads: on the CPU, the target's; made anew for each graph where there are none, or too few.
    fused_drafter(const llama_model * model, const tap_store * store, const std::string & path,
                  const draft_params & params, int n_seq, int n_ctx, int top_k, int n_threads,
                  const draft_capabilities & allowed = {}, int draft_window = 0,
                  std::shared_ptr<const thread_pool> threads = nullptr);

    fused_drafter(const fused_drafter &) = delete;
    fused_drafter & operator=(const fused_drafter &) = delete;

    const draft_params & params() const { return weights_.params; }
    int n_vocab() const { return n_vocab_; }
    int top_k() const { return top_k_; }
    int length(int seq) const;
    int64_t n_builds() const { return n_builds_; }  // draft graphs made so far
    size_t n_weight_bytes() const { return weights_.n_bytes(); }
    size_t n_cache_bytes() const { return cache_.n_bytes(); }
    std::string device_name() const;

    // Rows of features become K and V at positions length(seq) and on.
    // Throws context_full_error, and backend_error also for features from the host that are not
    // finite; the cache is then as it was, but for rows before the window.
    void inject(int seq, const feature_rows & features);

    // Injects and starts to denoise all requests in one graph; all features come from one place.
    // `read` must follow; any other call that changes the cache gives the draft up first. Throws as
    // `inject` does.
    void begin(const std::vector<draft_request> & requests, int n_draft);

    // Of the draft that has begun; 0 for none.
    size_t n_begun() const { return flight_ ? flight_->requests.size() : 0; }
    int n_draft() const { return flight_ ? flight_->graph->bucket.n_draft : 0; }

    // Waits for the drafts of `begin` and writes, per request, position 1 .. n_draft and rank,
    // [n_requests, n_draft, top_k] ids and log-probabilities, best first. Throws backend_error when
    // the drafter's output is not a number; with a store, from where features come unchecked, the
    // cache is then empty.
    void read(int32_t * ids, float * logprobs);

    // Both.
    void draft(const std::vector<draft_request> & requests, int n_draft, int32_t * ids,
               float * logprobs);

    void truncate(int seq, int length);
    void copy(int from, int to, int length);

    // The rows of a sequence as bytes, [n_saved_bytes], and these as the rows of a sequence again.
    // `restore` throws as draft_cache does.
    size_t n_saved_bytes(int seq) const;
    void save(int seq, uint8_t * out) const;
    void restore(int seq, const uint8_t * saved, size_t n_bytes);

    // How many rows a draft after the first `length` ones would look at.
    int n_visible(int seq, int length) const;

  private:
    void check_sequence(int seq) const;
    void check_target_fits() const;
    void check_token(int32_t token) const;
    struct graph_slot;

    // What the requests of a draft need together.
    struct demand {
        int n_streams = 0;
        int64_t n_rows = 0;
        int64_t longest = 0;  // rows of a sequence, the new ones included
        bool stored = false;  // features come from the store
    };

    // A draft that the device is working on. `lengths`: of the cache before it.
    struct flight {
        draft_graph * graph;
        std::vector<draft_request> requests;
        std::vector<int> lengths;
    };

    demand check_requests(const std::vector<draft_request> & requests, int n_draft) const;
    void abandon();
    void check_features(const feature_rows & features) const;
    graph_slot & graph(const draft_bucket & bucket);
    void inject_rows(int seq, const feature_rows & features);
    void fill_rows(draft_graph & g, const std::vector<draft_request> & requests);
    void fill_blocks(graph_slot & slot, const std::vector<draft_request> & requests);
    void embed(int32_t token, std::vector<float> & row) const;

    // In the order that they must outlive each other; graphs go first.
    target_tensors target_;
    const tap_store * store_;
    std::shared_ptr<const thread_pool> threads_;
    ggml_backend_ptr backend_;
    draft_weights weights_;
    draft_cache cache_;
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
    std::map<draft_bucket, graph_slot> graphs_;
    uint64_t clock_ = 0;
    int64_t n_builds_ = 0;
    std::optional<flight> flight_;
};

}  // namespace dflash
