#include "heads_drafter.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "backend.h"
#include "chunks.h"
#include "errors.h"

namespace dflash {

namespace {

// Drafts of a few lengths, for one sequence and for all.
constexpr size_t kept_graphs = 16;
// Rows that nearly all rounds inject.
constexpr int few_on_host = 4, few_on_gpu = 8;
constexpr int largest_fused_rows = 64;

// A cache of one layer, with room for a draft after each sequence.
draft_params cache_params(const heads_params & p) {
    draft_params params;
    params.n_layer = 1;
    params.n_head_kv = p.n_head_kv;
    params.head_dim = p.head_dim;
    params.block_size = p.n_draft + 1;
    return params;
}

}  // namespace

heads_drafter::heads_drafter(const llama_model * model, std::shared_ptr<const tap_store> store,
                             const heads_params & params, int n_seq, int n_ctx, int n_threads,
                             std::shared_ptr<const thread_pool> threads)
    : weights_(model, params),
      store_(std::move(store)),
      threads_(std::move(threads)),
      n_threads_(n_threads),
      backend_(open_backend(weights_.device(), n_threads)),
      cache_(cache_params(params), weights_.device(), n_seq, n_ctx, 0),
      sizes_(weights_.device(), few_on_host, few_on_gpu),
      states_(new_tensors(2)),
      scratch_(backend_.get()) {
    if (store_ == nullptr || store_->n_features() != params.n_embd) {
        throw std::invalid_argument("the target is not open for its heads");
    }
    if (threads_ && threads_->n_threads() < n_threads) {
        threads_ = nullptr;
    }
    weights_.place(backend_.get());
    kept_ = ggml_new_tensor_2d(states_.get(), GGML_TYPE_F32, params.n_embd, n_seq + 1);
    const int64_t n_rows = weights_.head->ne[1];
    const int64_t chunk = chunk_of(n_rows);
    ids_ = ggml_new_tensor_2d(states_.get(), GGML_TYPE_I32, chunk, n_rows / chunk);
    state_buffer_.reset(ggml_backend_alloc_ctx_tensors(states_.get(), backend_.get()));
    if (!state_buffer_) {
        refuse_room(backend_.get(), "the states of the target's heads");
    }
    ggml_backend_buffer_clear(state_buffer_.get(), 0);
    std::vector<int32_t> ids(n_rows);
    for (int64_t i = 0; i < n_rows; i++) {
        ids[i] = static_cast<int32_t>(std::min<int64_t>(i, weights_.n_vocab() - 1));
    }
    ggml_backend_tensor_set(ids_, ids.data(), 0, ids.size() * sizeof(int32_t));
    // What this backend cannot compute is refused here, before drafts rely on it.
    cache_.reserve(1);
    const int n_kv = std::min(sizes_.cells(1), cache_.n_cells());
    slot({1, sizes_.rows(1), n_kv, params.n_draft});
}

int heads_drafter::length(int seq) const {
    check_sequence(seq);
    return cache_.length(seq);
}

void heads_drafter::check_sequence(int seq) const {
    if (seq < 0 || seq >= cache_.n_seq()) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " is not in 0 .. " +
                                    std::to_string(cache_.n_seq() - 1));
    }
}

void heads_drafter::check_token(int32_t token) const {
    if (token < 0 || token >= weights_.n_vocab()) {
        throw std::invalid_argument("token " + std::to_string(token) + " is not in 0 .. " +
                                    std::to_string(weights_.n_vocab() - 1));
    }
}

void heads_drafter::check_rows(const heads_rows & rows) const {
    if (rows.tokens.size() != rows.stored.size()) {
        throw std::invalid_argument("each row has one token and one state");
    }
    store_->check(rows.stored);
    for (const int32_t token : rows.tokens) {
        check_token(token);
    }
}

heads_drafter::graph_slot & heads_drafter::slot(const heads_bucket & bucket) {
    auto it = graphs_.find(bucket);
    if (it == graphs_.end()) {
        if (graphs_.size() >= kept_graphs) {
            graphs_.erase(std::min_element(graphs_.begin(), graphs_.end(),
                                           [](const auto & a, const auto & b) {
                                               return a.second.last_use < b.second.last_use;
                                           }));
        }
        graph_slot made;
        n_builds_++;
        const size_t before = scratch_.n_bytes();
        try {
            made.graph = std::make_unique<heads_graph>(
                heads_parts{weights_, cache_, *store_, kept_, ids_, backend_.get(), scratch_},
                bucket);
        } catch (...) {
            graphs_.clear();  // their memory may be gone
            throw;
        }
        if (scratch_.n_bytes() != before) {
            graphs_.clear();  // they had the smaller memory
        }
        if (bucket.n_streams > 0) {
            made.mask =
                std::make_unique<draft_mask>(made.graph->mask(), bucket.n_kv,
                                             bucket.n_streams * bucket.n_draft, cache_.n_ring());
        }
        it = graphs_.emplace(bucket, std::move(made)).first;
    }
    it->second.last_use = ++clock_;
    return it->second;
}

void heads_drafter::inject(int seq, const heads_rows & rows) {
    check_sequence(seq);
    check_rows(rows);
    if (cache_.reserve(int64_t{cache_.length(seq)} + rows.n())) {
        graphs_.clear();
    }
    inject_rows(seq, rows);
}

void heads_drafter::inject_rows(int seq, const heads_rows & rows) {
    for (int done = 0; done < rows.n();) {
        const int n = std::min(draft_sizes::most_rows, rows.n() - done);
        heads_request part;
        part.seq = seq;
        part.rows.tokens.assign(rows.tokens.begin() + done, rows.tokens.begin() + done + n);
        part.rows.stored.assign(rows.stored.begin() + done, rows.stored.begin() + done + n);
        heads_graph & g = *slot({0, sizes_.rows(n), 0, 0}).graph;
        fill_rows(g, {part});
        compute(g);
        cache_.set_length(seq, cache_.length(seq) + n);
        done += n;
    }
}

// Unused rows read a token and a state that are there, and go to the spare cell.
void heads_drafter::fill_rows(heads_graph & g, const std::vector<heads_request> & requests) {
    const heads_bucket & b = g.bucket;
    const int spare = cache_.n_seq();
    std::fill_n(g.tokens(), b.n_read(), 0);
    std::fill_n(g.stored_cells(), b.n_read(), 0);
    std::fill_n(g.positions(), b.n_rows, 0);
    std::fill_n(g.cells(), b.n_rows, cache_.spare_cell());
    for (int i = 0; i < b.n_firsts(); i++) {  // of sequences without a request
        g.first_rows()[i] = b.n_rows + i;
        g.first_seqs()[i] = std::min(i, spare);
        g.last_cells()[i] = 0;
        g.last_seqs()[i] = spare;
    }
    int row = 0;
    for (const heads_request & r : requests) {
        const int i = b.n_streams > 0 ? r.seq : 0;
        const int n = r.rows.n();
        const int start = cache_.length(r.seq);
        g.first_seqs()[i] = r.seq;
        if (n > 0) {
            g.first_rows()[i] = row;
            g.last_cells()[i] = store_->cell(r.rows.stored.back());
            g.last_seqs()[i] = r.seq;
        }
        for (int k = 0; k < n; k++, row++) {
            g.tokens()[row] = r.rows.tokens[k];
            g.stored_cells()[row] = k > 0 ? store_->cell(r.rows.stored[k - 1]) : 0;
            g.positions()[row] = start + k;
            g.cells()[row] = cache_.cell(r.seq, start + k);
        }
        if (b.n_streams > 0) {
            g.tokens()[b.n_rows + r.seq] = r.anchor;
            g.stored_cells()[b.n_rows + r.seq] = n > 0 ? store_->cell(r.rows.stored.back()) : 0;
        }
    }
}

// Sequences between those that draft make a draft, too, which is not read.
void heads_drafter::fill_drafts(graph_slot & s, const std::vector<heads_request> & requests) {
    heads_graph & g = *s.graph;
    const heads_bucket & b = g.bucket;
    std::vector<int> starts(b.n_streams);
    for (int seq = 0; seq < b.n_streams; seq++) {
        starts[seq] = cache_.length(seq);
    }
    for (const heads_request & r : requests) {
        starts[r.seq] += r.rows.n();
    }
    for (int step = 0; step < b.n_draft; step++) {
        for (int seq = 0; seq < b.n_streams; seq++) {
            const int at = step * b.n_streams + seq;
            const int position = starts[seq] + step;
            g.positions()[b.n_rows + at] = position;
            g.cells()[b.n_rows + at] = cache_.cell(seq, position);
            s.mask->show(at, 0, position + 1);
        }
    }
}

heads_drafts heads_drafter::draft(std::vector<heads_request> requests, int n_draft) {
    if (n_draft < 1 || n_draft > weights_.params.n_draft) {
        throw std::invalid_argument("cannot draft " + std::to_string(n_draft) +
                                    " tokens; the most is " +
                                    std::to_string(weights_.params.n_draft));
    }
    std::vector<bool> seen(cache_.n_seq(), false);
    int n_streams = 0;
    int n_rows = 0;
    int64_t longest = 0;
    for (const heads_request & r : requests) {
        check_sequence(r.seq);
        check_rows(r.rows);
        check_token(r.anchor);
        if (seen[r.seq]) {
            throw std::invalid_argument("sequence " + std::to_string(r.seq) +
                                        " is asked to draft twice in one graph");
        }
        seen[r.seq] = true;
        n_streams = std::max(n_streams, r.seq + 1);
        n_rows += r.rows.n();
        longest = std::max(longest, int64_t{cache_.length(r.seq)} + r.rows.n());
    }
    if (requests.empty()) {
        return {};
    }
    if (cache_.reserve(longest)) {
        graphs_.clear();
    }
    if (n_rows > largest_fused_rows) {
        for (heads_request & r : requests) {
            inject_rows(r.seq, r.rows);
            r.rows = {};
        }
        n_rows = 0;
    }
    for (int seq = 0; seq < n_streams; seq++) {
        longest = std::max<int64_t>(longest, cache_.length(seq));
    }
    const int n_kv = std::min(sizes_.cells(longest + n_draft + 1), cache_.n_cells());
    graph_slot & s = slot({n_streams, n_rows == 0 ? 0 : sizes_.rows(n_rows), n_kv, n_draft});
    fill_rows(*s.graph, requests);
    fill_drafts(s, requests);
    compute(*s.graph);
    heads_drafts out;
    try {
        for (const heads_request & r : requests) {
            for (int step = 0; step < n_draft; step++) {
                s.graph->read(step, r.seq, &out.ids.emplace_back(), &out.logprobs.emplace_back());
            }
        }
    } catch (...) {
        forget_all();
        throw;
    }
    for (const heads_request & r : requests) {
        cache_.set_length(r.seq, cache_.length(r.seq) + r.rows.n());
    }
    return out;
}

// States that are not numbers would spoil later drafts even from a hidden cell: zero times NaN is
// NaN.
void heads_drafter::forget_all() {
    cache_.clear();
    ggml_backend_tensor_memset(kept_, 0, 0, ggml_nbytes(kept_));
}

void heads_drafter::compute(heads_graph & graph) {
    if (threads_) {
        threads_->attach(backend_.get(), n_threads_);
    }
    try {
        graph.compute();
    } catch (...) {
        forget_all();
        throw;
    }
}

void heads_drafter::truncate(int seq, int length) {
    check_sequence(seq);
    const int had = cache_.length(seq);
    if (length < 0 || length > had) {
        throw std::invalid_argument("cannot truncate sequence " + std::to_string(seq) + " of " +
                                    std::to_string(had) + " rows to " + std::to_string(length));
    }
    if (length < had || length == 0) {
        cache_.set_length(seq, length);
        ggml_backend_tensor_memset(kept_, 0, seq * kept_->nb[1], state_bytes());
    }
}

void heads_drafter::copy(int from, int to, int length) {
    check_sequence(from);
    check_sequence(to);
    if (length < 0 || length > cache_.length(from)) {
        throw std::invalid_argument("cannot copy " + std::to_string(length) + " rows of sequence " +
                                    std::to_string(from) + ", which has " +
                                    std::to_string(cache_.length(from)));
    }
    if (from == to) {
        truncate(to, length);
        return;
    }
    std::vector<float> state(weights_.params.n_embd, 0.0f);
    if (length == cache_.length(from)) {
        ggml_backend_tensor_get(kept_, state.data(), from * kept_->nb[1], state_bytes());
    }
    cache_.copy(from, to, length);
    ggml_backend_tensor_set(kept_, state.data(), to * kept_->nb[1], state_bytes());
}

size_t heads_drafter::n_saved_bytes(int seq) const {
    check_sequence(seq);
    return state_bytes() + cache_.n_saved_bytes(seq);
}

void heads_drafter::save(int seq, uint8_t * out) const {
    check_sequence(seq);
    ggml_backend_tensor_get(kept_, out, seq * kept_->nb[1], state_bytes());
    cache_.save(seq, out + state_bytes());
}

void heads_drafter::restore(int seq, const uint8_t * saved, size_t n_bytes) {
    check_sequence(seq);
    if (n_bytes < state_bytes()) {
        throw std::invalid_argument("saved rows of heads: " + std::to_string(n_bytes) +
                                    " bytes are too few");
    }
    if (cache_.restore(seq, saved + state_bytes(), n_bytes - state_bytes())) {
        graphs_.clear();
    }
    ggml_backend_tensor_set(kept_, saved, seq * kept_->nb[1], state_bytes());
}

}  // namespace dflash
