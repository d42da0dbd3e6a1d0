#include "fused_drafter.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "backend.h"
#include "errors.h"

namespace dflash {

namespace {

// Enough for chains and trees of a few numbers of sequences, between which a server changes. To
// build a graph again takes as long as a draft.
constexpr size_t kept_graphs = 8;

// Rows that nearly all rounds inject.
constexpr int few_on_host = 8, few_on_gpu = 16;
constexpr int largest_fused_rows = 64;

}  // namespace

fused_drafter::fused_drafter(const llama_model * model, std::shared_ptr<const tap_store> store,
                             const std::string & path, const draft_params & params, int n_seq,
                             int n_ctx, int top_k, int n_threads,
                             const draft_capabilities & allowed, int draft_window,
                             std::shared_ptr<const thread_pool> threads)
    : target_(target_tensors::find(model)),
      store_(std::move(store)),
      threads_(std::move(threads)),
      n_threads_(n_threads),
      backend_(open_backend(target_.device(), n_threads)),
      weights_(path, params, backend_.get(), allowed.bf16),
      cache_(weights_.params, target_.device(), n_seq, n_ctx, draft_window),
      sizes_(target_.device(), few_on_host, few_on_gpu),
      top_k_(head_top_k(weights_.params, top_k)),
      allowed_(allowed),
      scratch_(backend_.get()) {
    check_target_fits();
    if (threads_ && threads_->n_threads() < n_threads) {
        threads_ = nullptr;
    }
    if (store_ != nullptr && store_->n_features() != weights_.params.n_features()) {
        store_ = nullptr;  // the target was opened for another drafter
    }
    n_vocab_ = static_cast<int>(std::min(target_.head->ne[1], target_.embedding->ne[1]));
    check_head_fits();
    copy_head();
    const auto n_drafted =
        static_cast<int>(weights_.tokens.empty() ? n_vocab_ : weights_.tokens.size());
    const int mask_token = weights_.params.mask_token;
    if (mask_token >= n_vocab_) {
        throw file_error("the drafter's mask token is " + std::to_string(mask_token) +
                         ", the target has " + std::to_string(n_vocab_) +
                         " tokens; take the drafter of this target");
    }
    if (top_k < 1 || top_k_ > n_drafted) {
        throw std::invalid_argument("top_k " + std::to_string(top_k) + " is not in 1 .. " +
                                    std::to_string(n_drafted));
    }
    if (weights_.params.selector.top_k > n_drafted) {
        throw file_error("the drafter's selector takes " +
                         std::to_string(weights_.params.selector.top_k) + " candidates of " +
                         std::to_string(n_drafted) + " tokens; convert it again");
    }
    embed(mask_token, mask_row_);
}

void fused_drafter::check_target_fits() const {
    const int n_embd = weights_.params.n_embd;
    for (const ggml_tensor * shared : {target_.head, target_.embedding}) {
        if (shared->ne[0] != n_embd) {
            throw file_error("the drafter is " + std::to_string(n_embd) + " wide, " + shared->name +
                             " of the target " + std::to_string(shared->ne[0]) +
                             "; take the drafter of this target");
        }
    }
    ggml_tensor * own_head = weights_.tokens.empty() ? weights_.head : nullptr;
    for (const ggml_tensor * own : {weights_.embedding, own_head, weights_.anchor_table}) {
        if (own != nullptr && own->ne[1] != target_.embedding->ne[1]) {
            throw file_error(std::string(own->name) + " of the drafter has " +
                             std::to_string(own->ne[1]) + " tokens, the target " +
                             std::to_string(target_.embedding->ne[1]) +
                             "; take the drafter of this target");
        }
    }
}

// That the tables of the head have a row for each of its tokens.
void fused_drafter::check_head_fits() const {
    const int64_t n_rows = (weights_.head != nullptr ? weights_.head : target_.head)->ne[1];
    ggml_tensor * added = weights_.markov.after;  // to the logits: not a row more, either
    for (const ggml_tensor * table :
         {weights_.markov.before, added, weights_.selector.before, weights_.selector.after}) {
        if (table != nullptr &&
            (table->ne[1] < n_rows || (table == added && table->ne[1] > n_rows))) {
            throw file_error(std::string(table->name) + " of the drafter has " +
                             std::to_string(table->ne[1]) + " tokens, the output head " +
                             std::to_string(n_rows) + "; take the drafter of this target");
        }
    }
    for (const int32_t token : weights_.tokens) {
        if (token >= n_vocab_) {
            throw file_error("the drafter knows the token " + std::to_string(token) +
                             ", the target has " + std::to_string(n_vocab_) +
                             " tokens; take the drafter of this target");
        }
    }
}

// A drafter without a head of its own computes with the target's, which stays as it is.
void fused_drafter::copy_head() {
    const ggml_tensor * head = target_.head;
    if (weights_.head != nullptr || !ggml_is_quantized(head->type)) {
        return;
    }
    const size_t n_bytes = ggml_row_size(GGML_TYPE_BF16, head->ne[0]) * head->ne[1];
    const bool copies = allowed_.bf16.has_value()
                            ? *allowed_.bf16
                            : pays_in_bf16(backend_.get(), head->type, head->ne[0], head->ne[1],
                                           weights_.params.n_drafts(), n_bytes);
    if (copies) {
        target_.head = head_.emplace(backend_.get(), target_.head).tensor;
    }
}

int fused_drafter::length(int seq) const {
    check_sequence(seq);
    return cache_.length(seq);
}

void fused_drafter::check_sequence(int seq) const {
    if (seq < 0 || seq >= cache_.n_seq()) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " is not in 0 .. " +
                                    std::to_string(cache_.n_seq() - 1));
    }
}

void fused_drafter::check_token(int32_t token) const {
    if (token < 0 || token >= n_vocab_) {
        throw std::invalid_argument("token " + std::to_string(token) + " is not in 0 .. " +
                                    std::to_string(n_vocab_ - 1));
    }
}

void fused_drafter::embed(int32_t token, std::vector<float> & row) const {
    read_row(weights_.embedding != nullptr ? weights_.embedding : target_.embedding, token, row);
    for (float & x : row) {
        x *= weights_.params.embedding_scale;
    }
}

void fused_drafter::check_features(const feature_rows & features) const {
    const int width = weights_.params.n_features();
    if (!features.stored.empty()) {
        if (store_ == nullptr) {
            throw std::invalid_argument("this drafter has no store of " + std::to_string(width) +
                                        " features to take rows from");
        }
        store_->check(features.stored);
        return;
    }
    // They would stay in the cells, and a masked weight of 0 times NaN is NaN, so later drafts
    // would be spoilt, too.
    const float * end = features.host + static_cast<size_t>(features.n) * width;
    if (!std::all_of(features.host, end, [](float x) { return std::isfinite(x); })) {
        throw backend_error(
            "hidden states of the target are not finite, nothing can be drafted from them; "
            "load without a drafter to see what the target puts out");
    }
}

fused_drafter::graph_slot & fused_drafter::graph(const draft_bucket & bucket) {
    auto it = graphs_.find(bucket);
    if (it == graphs_.end()) {
        if (graphs_.size() >= kept_graphs) {
            graphs_.erase(std::min_element(graphs_.begin(), graphs_.end(),
                                           [](const auto & a, const auto & b) {
                                               return a.second.last_use < b.second.last_use;
                                           }));
        }
        graph_slot slot;
        n_builds_++;
        const size_t before = scratch_.n_bytes();
        try {
            slot.graph =
                std::make_unique<draft_graph>(draft_parts{weights_, target_, cache_, store_.get(),
                                                          mask_row_, backend_.get(), scratch_},
                                              bucket, allowed_);
        } catch (...) {
            graphs_.clear();  // their memory may be gone
            throw;
        }
        if (scratch_.n_bytes() != before) {
            graphs_.clear();  // they had the smaller memory
        }
        if (bucket.n_streams > 0) {
            const int n_rows = bucket.n_streams * weights_.params.block_size;
            slot.mask.emplace(slot.graph->mask(), bucket.n_kv, n_rows, cache_.n_ring());
            if (weights_.params.sliding_window > 0) {
                slot.sliding_mask.emplace(slot.graph->sliding_mask(), bucket.n_kv, n_rows,
                                          cache_.n_ring());
            }
        }
        it = graphs_.emplace(bucket, std::move(slot)).first;
    }
    it->second.last_use = ++clock_;
    return it->second;
}

void fused_drafter::inject(int seq, const feature_rows & features) {
    abandon();
    check_sequence(seq);
    check_features(features);
    if (cache_.reserve(int64_t{cache_.length(seq)} + features.n)) {
        graphs_.clear();
    }
    const std::vector<int> lengths = cache_.lengths();
    try {
        inject_rows(seq, features);
    } catch (...) {
        cache_.set_lengths(lengths);
        throw;
    }
}

void fused_drafter::inject_rows(int seq, const feature_rows & features) {
    const int width = weights_.params.n_features();
    // Rows whose cells later ones take again are left out, so that no graph writes a cell twice.
    const int left_out = std::max(0, features.n - cache_.n_ring());
    cache_.set_length(seq, cache_.length(seq) + left_out);
    for (int done = left_out; done < features.n;) {
        const int n = std::min({draft_sizes::most_rows, cache_.n_ring(), features.n - done});
        feature_rows part{n};
        const bool is_stored = !features.stored.empty();
        if (is_stored) {
            const auto begin = features.stored.begin() + done;
            part.stored.assign(begin, begin + n);
        } else {
            part.host = features.host + static_cast<size_t>(done) * width;
        }
        draft_graph & g = *graph({0, sizes_.rows(n), 0, 0, 0, is_stored}).graph;
        fill_rows(g, {{seq, std::move(part), 0}});
        compute(g);
        cache_.set_length(seq, cache_.length(seq) + n);
        done += n;
    }
}

void fused_drafter::fill_rows(draft_graph & g, const std::vector<draft_request> & requests) {
    const draft_params & p = weights_.params;
    const int n_rows = g.bucket.n_rows;
    std::vector<int32_t> positions(n_rows, 0);
    std::vector<int64_t> cells(n_rows, cache_.spare_cell());
    int row = 0;
    for (const draft_request & r : requests) {
        if (r.features.host != nullptr && r.features.n > 0) {
            const auto width = static_cast<size_t>(p.n_features());
            std::copy_n(r.features.host, r.features.n * width, g.features() + row * width);
        }
        const int start = cache_.length(r.seq);
        cache_.overwrite(r.seq, start + r.features.n);
        for (int i = 0; i < r.features.n; i++, row++) {
            positions[row] = start + i;
            cells[row] = cache_.cell(r.seq, start + i);
            if (g.bucket.stored) {
                g.stored_cells()[row] = store_->cell(r.features.stored[i]);
            }
        }
    }
    for (int layer = 0; layer < p.n_layer; layer++) {
        std::copy(positions.begin(), positions.end(), g.row_positions() + layer * n_rows);
        std::transform(cells.begin(), cells.end(), g.row_cells() + layer * n_rows,
                       [&](int64_t cell) { return cache_.cell_of_all(layer, cell); });
    }
}

void fused_drafter::fill_blocks(graph_slot & slot, const std::vector<draft_request> & requests) {
    draft_graph & g = *slot.graph;
    const draft_params & p = weights_.params;
    // Sequences between those that draft denoise a block, too, which is not read.
    std::vector<int> starts(g.bucket.n_streams);
    for (int s = 0; s < g.bucket.n_streams; s++) {
        starts[s] = cache_.length(s);
    }
    std::vector<float> row;
    for (const draft_request & r : requests) {
        starts[r.seq] += r.features.n;
        embed(r.anchor, row);
        std::copy(row.begin(), row.end(), g.anchors() + static_cast<size_t>(r.seq) * p.n_embd);
        g.anchor_tokens[r.seq] = r.anchor;
        if (p.rank() > 0) {
            read_row(weights_.anchor_table, r.anchor, row);
            std::copy(row.begin(), row.end(),
                      g.anchor_rows() + static_cast<size_t>(r.seq) * p.rank());
        }
    }
    for (int s = 0; s < g.bucket.n_streams; s++) {
        cache_.overwrite(s, starts[s] + p.block_size);
        const int visible = cache_.first_visible(s, starts[s]);
        for (int i = 0; i < p.block_size; i++) {
            const int at = s * p.block_size + i;
            g.block_positions()[at] = starts[s] + i;
            g.block_cells()[at] = cache_.cell(s, starts[s] + i);
            const int end = starts[s] + (p.causal ? i + 1 : p.block_size);
            slot.mask->show(at, visible, end);
            if (slot.sliding_mask) {
                // A key is visible if it is less than a window before the query. Later keys of the
                // block are, unless the drafter is causal.
                const int first = std::max(visible, starts[s] + i - p.sliding_window + 1);
                slot.sliding_mask->show(at, first, end);
            }
        }
    }
}

fused_drafter::demand fused_drafter::check_requests(const std::vector<draft_request> & requests,
                                                    int n_draft) const {
    const draft_params & p = weights_.params;
    if (n_draft < 1 || n_draft > p.n_drafts()) {
        throw std::invalid_argument("cannot draft " + std::to_string(n_draft) +
                                    " tokens with a block of " + std::to_string(p.block_size));
    }
    demand found;
    bool from_host = false;
    std::vector<bool> seen(cache_.n_seq(), false);
    for (const draft_request & r : requests) {
        check_sequence(r.seq);
        check_token(r.anchor);
        check_features(r.features);
        if (seen[r.seq]) {
            throw std::invalid_argument("sequence " + std::to_string(r.seq) +
                                        " is asked to draft twice in one graph");
        }
        seen[r.seq] = true;
        found.stored = found.stored || !r.features.stored.empty();
        from_host = from_host || (r.features.n > 0 && r.features.host != nullptr);
        found.n_streams = std::max(found.n_streams, r.seq + 1);
        found.n_rows += r.features.n;
        found.longest = std::max(found.longest, int64_t{cache_.length(r.seq)} + r.features.n);
    }
    if (found.stored && from_host) {
        throw std::invalid_argument("features of one draft come from the host or from the store");
    }
    return found;
}

void fused_drafter::begin(const std::vector<draft_request> & requests, int n_draft) {
    abandon();
    const demand wanted = check_requests(requests, n_draft);
    if (requests.empty()) {
        return;
    }
    if (cache_.reserve(wanted.longest)) {
        graphs_.clear();
    }
    pending_draft begun{nullptr, requests, cache_.lengths()};
    try {
        begun.graph = &launch(begun.requests, wanted, n_draft);
    } catch (...) {
        cache_.set_lengths(begun.lengths);
        throw;
    }
    pending_ = std::move(begun);
}

// Injects rows that are too many for one graph with the blocks, and takes them out of the requests.
draft_graph & fused_drafter::launch(std::vector<draft_request> & requests, const demand & wanted,
                                    int n_draft) {
    int64_t n_rows = wanted.n_rows;
    if (n_rows > largest_fused_rows) {
        for (draft_request & r : requests) {
            inject_rows(r.seq, r.features);
            r.features = {};
        }
        n_rows = 0;
    }
    int64_t longest = wanted.longest;
    for (int s = 0; s < wanted.n_streams; s++) {
        longest = std::max<int64_t>(longest, cache_.length(s));
    }
    const int n_kv = std::min(sizes_.cells(longest + weights_.params.block_size), cache_.n_cells());
    // Without new rows, take the graph for rows from where they usually come.
    const bool from_store = wanted.stored || (n_rows == 0 && store_ != nullptr);
    graph_slot & slot = graph({wanted.n_streams, sizes_.rows(static_cast<int>(n_rows)), n_kv,
                               n_draft, top_k_, from_store});
    fill_rows(*slot.graph, requests);
    fill_blocks(slot, requests);
    compute(*slot.graph);
    return *slot.graph;
}

void fused_drafter::compute(draft_graph & graph) {
    if (threads_) {
        threads_->attach(backend_.get(), n_threads_);
    }
    graph.compute();
}

drafts fused_drafter::read() {
    if (!pending_) {
        throw std::invalid_argument("no draft has begun");
    }
    const pending_draft done = std::move(*pending_);
    pending_.reset();
    const draft_bucket & bucket = done.graph->bucket;
    const size_t n = static_cast<size_t>(bucket.n_draft) * bucket.n_streams * bucket.top_k;
    const bool has_steps = weights_.params.rank() > 0 && top_k_ > 1;
    std::vector<int32_t> ids(n);
    std::vector<float> logprobs(n);
    std::vector<float> steps(has_steps ? n * bucket.top_k : 0);
    try {
        done.graph->read({ids.data(), logprobs.data(), has_steps ? steps.data() : nullptr});
    } catch (const backend_error &) {
        if (store_ != nullptr) {
            // Stored features that are not numbers, injected now or before, would spoil later
            // drafts even from a hidden cell: zero times NaN is NaN.
            cache_.clear();
        } else {
            cache_.set_lengths(done.lengths);
        }
        throw;
    }
    drafts out;
    out.n_draft = bucket.n_draft;
    for (const draft_request & r : done.requests) {
        const auto take = [&](const auto & of_streams, auto & to) {
            const size_t n_each = of_streams.size() / bucket.n_streams;
            const auto from = of_streams.begin() + static_cast<std::ptrdiff_t>(r.seq * n_each);
            to.insert(to.end(), from, from + static_cast<std::ptrdiff_t>(n_each));
        };
        take(ids, out.ids);
        take(logprobs, out.logprobs);
        take(steps, out.steps);
        cache_.set_length(r.seq, cache_.length(r.seq) + r.features.n);
    }
    if (!weights_.tokens.empty()) {
        for (int32_t & id : out.ids) {
            id = weights_.tokens[id];
        }
    }
    return out;
}

void fused_drafter::abandon() {
    if (pending_) {
        ggml_backend_synchronize(backend_.get());
        cache_.set_lengths(pending_->lengths);
        pending_.reset();
    }
}

void fused_drafter::truncate(int seq, int length) {
    abandon();
    check_sequence(seq);
    if (length < 0 || length > cache_.length(seq)) {
        throw std::invalid_argument("cannot truncate sequence " + std::to_string(seq) + " of " +
                                    std::to_string(cache_.length(seq)) + " rows to " +
                                    std::to_string(length));
    }
    cache_.set_length(seq, length);
}

void fused_drafter::copy(int from, int to, int length) {
    abandon();
    check_sequence(from);
    check_sequence(to);
    if (length < 0 || length > cache_.length(from)) {
        throw std::invalid_argument("cannot copy " + std::to_string(length) + " rows of sequence " +
                                    std::to_string(from) + ", which has " +
                                    std::to_string(cache_.length(from)));
    }
    cache_.copy(from, to, length);
}

size_t fused_drafter::n_saved_bytes(int seq) const {
    check_sequence(seq);
    return cache_.n_saved_bytes(seq);
}

void fused_drafter::save(int seq, uint8_t * out) const {
    check_sequence(seq);
    cache_.save(seq, out);
}

void fused_drafter::restore(int seq, const uint8_t * saved, size_t n_bytes) {
    abandon();
    check_sequence(seq);
    if (cache_.restore(seq, saved, n_bytes)) {
        graphs_.clear();
    }
}

int fused_drafter::n_visible(int seq, int length) const {
    check_sequence(seq);
    return length < 1 ? 0 : std::max(0, length - cache_.first_visible(seq, length));
}

}  // namespace dflash
