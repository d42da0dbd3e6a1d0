#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "draft_cache.h"
#include "draft_mask.h"
#include "draft_scratch.h"
#include "draft_sizes.h"
#include "heads_graph.h"
#include "heads_weights.h"
#include "llama.h"
#include "tap_store.h"
#include "thread_pool.h"

namespace dflash {

// The next rows of a sequence: their tokens, and the numbers in the target's store of its states
// after them.
struct heads_rows {
    std::vector<int32_t> tokens;
    std::vector<int64_t> stored;

    int n() const { return static_cast<int>(tokens.size()); }
};

struct heads_request {
    int seq = 0;
    heads_rows rows;
    int32_t anchor = 0;
};

// Chains of each request, [n_requests, n_draft].
struct heads_drafts {
    std::vector<int32_t> ids;
    std::vector<float> logprobs;
};

// A head of the target's own file at work: its cache for N sequences, and the graphs over it. Not
// thread safe. The model must outlive it.
class heads_drafter {
  public:
    // store: that of the target, whose only tap is the state that heads read.
    // threads: as of a fused_drafter.
    // Throws file_error, backend_error as heads_weights, std::invalid_argument for a number out of
    // range.
    heads_drafter(const llama_model * model, std::shared_ptr<const tap_store> store,
                  const heads_params & params, int n_seq, int n_ctx, int n_threads,
                  std::shared_ptr<const thread_pool> threads = nullptr);

    heads_drafter(const heads_drafter &) = delete;
    heads_drafter & operator=(const heads_drafter &) = delete;

    int length(int seq) const;
    int64_t n_builds() const { return n_builds_; }

    // Takes in the rows of positions length(seq) and up. Throws context_full_error, backend_error.
    void inject(int seq, const heads_rows & rows);

    // Takes in the rows of all requests, and drafts n_draft tokens after each anchor, in one graph.
    // Throws as `inject`, and backend_error if the output is not a number. All sequences are then
    // empty.
    heads_drafts draft(std::vector<heads_request> requests, int n_draft);

    // What a text lost by being cut is the target's state before the next token: it is 0 then.
    void truncate(int seq, int length);
    void copy(int from, int to, int length);

    // The rows of a sequence and the state after them as bytes, [n_saved_bytes], and back.
    size_t n_saved_bytes(int seq) const;
    void save(int seq, uint8_t * out) const;
    void restore(int seq, const uint8_t * saved, size_t n_bytes);

  private:
    struct graph_slot {
        std::unique_ptr<heads_graph> graph;
        std::unique_ptr<draft_mask> mask;
        uint64_t last_use = 0;
    };

    void check_sequence(int seq) const;
    void check_rows(const heads_rows & rows) const;
    void check_token(int32_t token) const;
    void inject_rows(int seq, const heads_rows & rows);
    graph_slot & slot(const heads_bucket & bucket);
    void fill_rows(heads_graph & g, const std::vector<heads_request> & requests);
    void fill_drafts(graph_slot & slot, const std::vector<heads_request> & requests);
    void compute(heads_graph & graph);
    void forget_all();
    size_t state_bytes() const { return weights_.params.n_embd * sizeof(float); }

    // In the order that they must outlive each other; graphs go first.
    heads_weights weights_;
    std::shared_ptr<const tap_store> store_;
    std::shared_ptr<const thread_pool> threads_;
    int n_threads_;
    ggml_backend_ptr backend_;
    draft_cache cache_;
    draft_sizes sizes_;
    ggml_context_ptr states_;
    ggml_backend_buffer_ptr state_buffer_;
    ggml_tensor * kept_ = nullptr;  // f32 [n_embd, n_seq + 1], see heads_parts
    ggml_tensor * ids_ = nullptr;   // see heads_parts
    draft_scratch scratch_;
    std::map<heads_bucket, graph_slot> graphs_;
    uint64_t clock_ = 0;
    int64_t n_builds_ = 0;
};

}  // namespace dflash
