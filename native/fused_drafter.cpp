#include "fused_drafter.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "errors.h"
#include "top_k.h"

namespace dflash {

namespace {

constexpr int kv_step = 256;       // graphs are rebuilt when the context crosses a multiple
constexpr int smallest_rows = 4;   // row buckets are powers of two from here ...
constexpr int largest_rows = 512;  // ... to here; more rows go in several graphs
constexpr int largest_fused_rows = 64;
constexpr size_t kept_graphs = 8;
constexpr int most_threads = 512;  // as llama.cpp

int rows_bucket(int n) {
    int rows = smallest_rows;
    while (rows < n) {
        rows *= 2;
    }
    return rows;
}

// The lengths of a cache, which return to what they were when the work on it throws.
class length_guard {
  public:
    explicit length_guard(draft_cache & cache) : cache_(cache), lengths_(cache.lengths()) {}
    ~length_guard() {
        if (!done_) {
            cache_.set_lengths(std::move(lengths_));
        }
    }
    length_guard(const length_guard &) = delete;
    length_guard & operator=(const length_guard &) = delete;

    void done() { done_ = true; }

  private:
    draft_cache & cache_;
    std::vector<int> lengths_;
    bool done_ = false;
};

ggml_backend_ptr open_backend(ggml_backend_dev_t device, int n_threads) {
    if (n_threads < 1 || n_threads > most_threads) {
        throw std::invalid_argument("n_threads " + std::to_string(n_threads) + " is not in 1 .. " +
                                    std::to_string(most_threads));
    }
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    if (!backend) {
        throw backend_error(std::string("cannot open ") + ggml_backend_dev_name(device) +
                            " for the drafter");
    }
    const auto set_n_threads =
        reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads"));
    if (set_n_threads != nullptr) {
        set_n_threads(backend.get(), n_threads);
    }
    return backend;
}

// What is not finite would stay in the cells, and a masked weight of 0 times NaN is NaN: it would
// spoil later drafts, too.
void check_finite(const float * features, size_t n) {
    constexpr uint32_t exponent = 0x7f800000;
    bool finite = true;
    for (size_t i = 0; i < n; i++) {  // no early exit, so that compilers vectorise it
        uint32_t bits;
        std::memcpy(&bits, features + i, sizeof(bits));
        finite &= (bits & exponent) != exponent;
    }
    if (!finite) {
        throw backend_error(
            "hidden states of the target are not finite, nothing can be drafted from them; "
            "load without a drafter to see what the target puts out");
    }
}

// Sorting needs numbers, and drafts made of anything else are no drafts.
void check_numbers(const std::vector<float> & values) {
    if (std::any_of(values.begin(), values.end(), [](float x) { return std::isnan(x); })) {
        throw backend_error(
            "the drafter's output is not a number; fetch its file again, or load without a "
            "drafter");
    }
}

}  // namespace

fused_drafter::fused_drafter(const llama_model * model, const std::string & path, int n_seq,
                             int n_ctx, int top_k, int n_threads,
                             const draft_capabilities & allowed)
    : target_(target_tensors::find(model)),
      backend_(open_backend(target_.device(), n_threads)),
      weights_(path, target_.device()),
      cache_(weights_.params, target_.device(), n_seq, n_ctx),
      top_k_(top_k),
      allowed_(allowed) {
    check_target_fits();
    n_vocab_ = static_cast<int>(std::min(target_.head->ne[1], target_.embedding->ne[1]));
    const int mask_token = weights_.params.mask_token;
    if (mask_token >= n_vocab_) {
        throw file_error("the drafter's mask token is " + std::to_string(mask_token) +
                         ", the target has " + std::to_string(n_vocab_) +
                         " tokens; take the drafter of this target");
    }
    if (top_k < 1 || top_k > n_vocab_) {
        throw std::invalid_argument("top_k " + std::to_string(top_k) + " is not in 1 .. " +
                                    std::to_string(n_vocab_));
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
    for (const ggml_tensor * own : {weights_.embedding, weights_.head}) {
        if (own != nullptr && own->ne[1] != target_.embedding->ne[1]) {
            throw file_error(std::string(own->name) + " of the drafter has " +
                             std::to_string(own->ne[1]) + " tokens, the target " +
                             std::to_string(target_.embedding->ne[1]) +
                             "; take the drafter of this target");
        }
    }
}

std::string fused_drafter::device_name() const {
    return ggml_backend_dev_name(ggml_backend_get_device(backend_.get()));
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

draft_graph & fused_drafter::graph(const draft_bucket & bucket) {
    auto it = graphs_.find(bucket);
    if (it == graphs_.end()) {
        if (graphs_.size() >= kept_graphs) {
            graphs_.erase(std::min_element(graphs_.begin(), graphs_.end(),
                                           [](const auto & a, const auto & b) {
                                               return a.second.last_use < b.second.last_use;
                                           }));
        }
        auto built = std::make_unique<draft_graph>(weights_, target_, cache_, backend_.get(),
                                                   bucket, allowed_);
        const size_t n_columns = static_cast<size_t>(bucket.n_streams) * weights_.params.block_size;
        for (size_t i = 0; i < n_columns; i++) {
            const size_t n = mask_row_.size() * sizeof(float);
            ggml_backend_tensor_set(built->block, mask_row_.data(), i * n, n);
        }
        it = graphs_.emplace(bucket, graph_slot{std::move(built), 0}).first;
    }
    it->second.last_use = ++clock_;
    return *it->second.graph;
}

void fused_drafter::inject(int seq, const float * features, int n_rows) {
    check_sequence(seq);
    check_finite(features, static_cast<size_t>(n_rows) * weights_.params.n_features());
    if (cache_.reserve(int64_t{cache_.length(seq)} + n_rows)) {
        graphs_.clear();
    }
    length_guard guard(cache_);
    inject_rows(seq, features, n_rows);
    guard.done();
}

void fused_drafter::inject_rows(int seq, const float * features, int n_rows) {
    for (int done = 0; done < n_rows;) {
        const int n = std::min(largest_rows, n_rows - done);
        draft_graph & g = graph({0, rows_bucket(n), 0, 0, 0});
        const size_t width = weights_.params.n_features();
        upload_rows(g, {{seq, features + done * width, n, 0}});
        g.compute();
        cache_.set_length(seq, cache_.length(seq) + n);
        done += n;
    }
}

void fused_drafter::upload_rows(draft_graph & g, const std::vector<draft_request> & requests) {
    const int n_rows = g.bucket.n_rows;
    std::vector<int32_t> positions(n_rows, 0);
    std::vector<int64_t> cells(n_rows, cache_.spare_cell());
    const size_t row_bytes = weights_.params.n_features() * sizeof(float);
    int row = 0;
    for (const draft_request & r : requests) {
        ggml_backend_tensor_set(g.features, r.features, row * row_bytes, r.n_rows * row_bytes);
        const int start = cache_.length(r.seq);
        for (int i = 0; i < r.n_rows; i++, row++) {
            positions[row] = start + i;
            cells[row] = cache_.cell(r.seq, start + i);
        }
    }
    ggml_backend_tensor_set(g.row_positions, positions.data(), 0,
                            positions.size() * sizeof(int32_t));
    ggml_backend_tensor_set(g.row_cells, cells.data(), 0, cells.size() * sizeof(int64_t));
}

void fused_drafter::upload_blocks(draft_graph & g, const std::vector<draft_request> & requests) {
    const int n_streams = g.bucket.n_streams;
    const int block = weights_.params.block_size;
    // A sequence between those that draft denoises a block, too, which nobody reads.
    std::vector<int> starts(n_streams);
    for (int s = 0; s < n_streams; s++) {
        starts[s] = cache_.length(s);
    }
    std::vector<float> row;
    for (const draft_request & r : requests) {
        starts[r.seq] += r.n_rows;
        embed(r.anchor, row);
        const size_t n = row.size() * sizeof(float);
        ggml_backend_tensor_set(g.block, row.data(), n * block * r.seq, n);
    }
    std::vector<int32_t> positions;
    std::vector<int64_t> cells;
    for (int s = 0; s < n_streams; s++) {
        for (int i = 0; i < block; i++) {
            positions.push_back(starts[s] + i);
            cells.push_back(cache_.cell(s, starts[s] + i));
        }
    }
    ggml_backend_tensor_set(g.block_positions, positions.data(), 0,
                            positions.size() * sizeof(int32_t));
    ggml_backend_tensor_set(g.block_cells, cells.data(), 0, cells.size() * sizeof(int64_t));
    upload_masks(g, starts);
}

void fused_drafter::upload_masks(draft_graph & g, const std::vector<int> & starts) {
    const draft_params & p = weights_.params;
    const ggml_fp16_t visible = ggml_fp32_to_fp16(0.0f);
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY);
    const size_t n_kv = g.bucket.n_kv;
    std::vector<ggml_fp16_t> mask(n_kv * p.block_size * starts.size());
    const auto fill = [&](ggml_tensor * tensor, int window) {
        std::fill(mask.begin(), mask.end(), hidden);
        for (size_t s = 0; s < starts.size(); s++) {
            const int end = starts[s] + p.block_size;
            for (int i = 0; i < p.block_size; i++) {
                // A key is seen when fewer than `window` positions lie between it and the query;
                // what comes after the query in the block always is.
                const int first = window > 0 ? std::max(0, starts[s] + i - window + 1) : 0;
                ggml_fp16_t * r = mask.data() + (s * p.block_size + i) * n_kv;
                std::fill(r + first, r + end, visible);
            }
        }
        ggml_backend_tensor_set(tensor, mask.data(), 0, mask.size() * sizeof(ggml_fp16_t));
    };
    fill(g.mask, 0);
    if (g.sliding_mask != nullptr) {
        fill(g.sliding_mask, p.sliding_window);
    }
}

void fused_drafter::draft(const std::vector<draft_request> & requests, int n_draft, int32_t * ids,
                          float * logprobs) {
    const draft_params & p = weights_.params;
    if (n_draft < 1 || n_draft >= p.block_size) {
        throw std::invalid_argument("cannot draft " + std::to_string(n_draft) +
                                    " tokens with a block of " + std::to_string(p.block_size));
    }
    int n_streams = 0;
    int64_t n_rows = 0;
    int64_t longest = 0;
    std::vector<bool> seen(cache_.n_seq(), false);
    for (const draft_request & r : requests) {
        check_sequence(r.seq);
        check_token(r.anchor);
        check_finite(r.features, static_cast<size_t>(r.n_rows) * p.n_features());
        if (seen[r.seq]) {
            throw std::invalid_argument("sequence " + std::to_string(r.seq) +
                                        " is asked to draft twice in one graph");
        }
        seen[r.seq] = true;
        n_streams = std::max(n_streams, r.seq + 1);
        n_rows += r.n_rows;
        longest = std::max(longest, int64_t{cache_.length(r.seq)} + r.n_rows);
    }
    if (requests.empty()) {
        return;
    }
    if (cache_.reserve(longest)) {
        graphs_.clear();
    }
    length_guard guard(cache_);
    std::vector<draft_request> rest = requests;
    if (n_rows > largest_fused_rows) {
        for (draft_request & r : rest) {
            inject_rows(r.seq, r.features, r.n_rows);
            r.n_rows = 0;
        }
        n_rows = 0;
    }
    for (int s = 0; s < n_streams; s++) {
        longest = std::max<int64_t>(longest, cache_.length(s));
    }
    const int n_kv = (static_cast<int>(longest) + p.block_size + kv_step - 1) / kv_step * kv_step;
    const int rows = rows_bucket(static_cast<int>(n_rows));
    draft_graph & g = graph({n_streams, rows, n_kv, n_draft, top_k_});
    upload_rows(g, rest);
    upload_blocks(g, rest);
    g.compute();

    std::vector<int32_t> all_ids;
    std::vector<float> all_logprobs;
    download(g, all_ids, all_logprobs);
    const size_t per_stream = static_cast<size_t>(n_draft) * top_k_;
    for (size_t i = 0; i < rest.size(); i++) {
        const draft_request & r = rest[i];
        std::copy_n(all_ids.data() + r.seq * per_stream, per_stream, ids + i * per_stream);
        std::copy_n(all_logprobs.data() + r.seq * per_stream, per_stream,
                    logprobs + i * per_stream);
        cache_.set_length(r.seq, cache_.length(r.seq) + r.n_rows);
    }
    guard.done();
}

void fused_drafter::download(draft_graph & g, std::vector<int32_t> & ids,
                             std::vector<float> & logprobs) const {
    const size_t n_rows = static_cast<size_t>(g.bucket.n_draft) * g.bucket.n_streams;
    ids.resize(n_rows * top_k_);
    logprobs.resize(n_rows * top_k_);
    if (g.ids != nullptr) {
        ggml_backend_tensor_get(g.ids, ids.data(), 0, ids.size() * sizeof(int32_t));
        ggml_backend_tensor_get(g.logprobs, logprobs.data(), 0, logprobs.size() * sizeof(float));
        check_numbers(logprobs);
        for (size_t i = 0; i < n_rows; i++) {
            sort_best_first(ids.data() + i * top_k_, logprobs.data() + i * top_k_, top_k_);
        }
        return;
    }
    const auto n_vocab = static_cast<size_t>(g.logits->ne[0]);
    std::vector<float> row(n_vocab);
    for (size_t i = 0; i < n_rows; i++) {
        ggml_backend_tensor_get(g.logits, row.data(), i * n_vocab * sizeof(float),
                                n_vocab * sizeof(float));
        check_numbers(row);
        top_k_of(row, top_k_, ids.data() + i * top_k_, logprobs.data() + i * top_k_);
    }
}

void fused_drafter::truncate(int seq, int length) {
    check_sequence(seq);
    if (length < 0 || length > cache_.length(seq)) {
        throw std::invalid_argument("cannot truncate sequence " + std::to_string(seq) + " of " +
                                    std::to_string(cache_.length(seq)) + " rows to " +
                                    std::to_string(length));
    }
    cache_.set_length(seq, length);
}

void fused_drafter::copy(int from, int to, int length) {
    check_sequence(from);
    check_sequence(to);
    if (length < 0 || length > cache_.length(from)) {
        throw std::invalid_argument("cannot copy " + std::to_string(length) + " rows of sequence " +
                                    std::to_string(from) + ", which has " +
                                    std::to_string(cache_.length(from)));
    }
    cache_.copy(from, to, length);
}

}  // namespace dflash
