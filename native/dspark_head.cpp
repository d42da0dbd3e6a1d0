#include "dspark_head.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "chunks.h"
#include "errors.h"
#include "no_number.h"
#include "wide_product.h"

namespace dflash {

namespace {

// Rows that are searched in chunks. On an H200 that takes 13 microseconds for one and 48 for eight,
// and whole rows, one beside the other, 31 for any number of them.
constexpr int most_in_chunks = 4;

}  // namespace

size_t dspark_head::n_nodes(int n_draft) const {
    return 28 * static_cast<size_t>(n_draft) + draft_output::n_nodes + draft_candidates::n_nodes +
           32;
}

void dspark_head::build(const head_parts & parts) {
    weights_ = &parts.weights;
    n_draft_ = parts.n_draft;
    n_streams_ = parts.n_streams;
    top_k_ = parts.top_k;
    ggml_context * c = parts.nodes;
    if (parts.weights.markov.confidence != nullptr) {
        confidence_ = ggml_mul_mat(c, parts.weights.markov.confidence, parts.states);
        ggml_prec_set_acc(confidence_, GGML_PREC_F32);
    }
    ggml_tensor * scaled = scaled_logits(c, parts.weights.params, parts.logits);
    create_constants(parts, scaled != parts.logits);
    follow_best(parts);
    if (top_k_ > 1) {
        build_steps(parts, scaled);
    }
    const std::vector<ggml_tensor *> results = {candidates_.ids, raw_, candidates_.sums, steps_,
                                                confidence_};
    for (ggml_tensor * result : results) {
        if (result != nullptr) {
            ggml_set_output(result);
            ggml_build_forward_expand(parts.graph, result);
        }
    }
    results_.place(parts.backend, results);
    if (top_k_ == 1) {
        output_.build(c, parts.graph, parts.backend, parts.scratch, scaled, 1, parts.wanted);
    }
}

// On some backends the argmax of values that are not numbers is -1. So whatever is looked up by one
// has valid memory before it.
void dspark_head::create_constants(const head_parts & parts, bool is_scaled) {
    const int64_t n_vocab = parts.logits->ne[0];
    const int64_t n_all = n_vocab * n_streams_;
    const int64_t n_joined = parts.weights.markov.n_joined;
    const int64_t rank = parts.weights.markov.after->ne[0];
    chunk_size_ = chunk_of(n_vocab);
    const auto aligned = [](int64_t n) { return (n + 63) / 64 * 64; };
    const int64_t gap = aligned(chunk_size_);
    const int64_t n_chunks = n_all / chunk_size_;
    const int64_t begin_found = gap + aligned(n_all) + gap;
    const int64_t begin_logits = begin_found + aligned(n_chunks) + gap;
    // The logits are beside a gap anyway if they are what is searched in the end.
    const int64_t n_logits = is_scaled ? ggml_nelements(parts.logits) : 0;
    constants_.reset(ggml_init({4 * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    ggml_context * c = constants_.get();
    ggml_tensor * all = ggml_new_tensor_1d(c, GGML_TYPE_I32, begin_logits + n_logits);
    const size_t word = sizeof(int32_t);
    tokens_ = ggml_view_3d(c, all, 1, chunk_size_, n_chunks, word, chunk_size_ * word, gap * word);
    columns_ = ggml_new_tensor_4d(c, GGML_TYPE_F32, rank, n_joined, n_joined, n_streams_);
    buffer_.reset(ggml_backend_alloc_ctx_tensors(c, parts.backend));
    if (!buffer_) {
        throw backend_error("no room for the output of the draft graph on " +
                            std::string(ggml_backend_name(parts.backend)));
    }
    std::vector<int32_t> words(ggml_nelements(all), 0);
    for (int64_t i = 0; i < n_all; i++) {
        words[gap + i] = static_cast<int32_t>(i % n_vocab);
    }
    ggml_backend_tensor_set(all, words.data(), 0, ggml_nbytes(all));
    std::vector<float> equal(ggml_nelements(columns_), 0.0f);
    for (int64_t i = 0; i < static_cast<int64_t>(equal.size()); i++) {
        const int64_t row = i / rank;
        equal[i] = row % n_joined == row / n_joined % n_joined ? 1.0f : 0.0f;
    }
    ggml_backend_tensor_set(columns_, equal.data(), 0, ggml_nbytes(columns_));
    char * base = static_cast<char *>(all->data);
    found_ = base + begin_found * word;
    if (is_scaled) {
        ggml_backend_tensor_alloc(buffer_.get(), parts.logits, base + begin_logits * word);
    }
}

// before: f32 [rank, n_streams]. Returns f32 [rows of the head, n_streams].
ggml_tensor * dspark_head::of_token_before(const head_parts & parts, ggml_tensor * before) const {
    ggml_context * c = parts.nodes;
    const markov_weights & w = parts.weights.markov;
    const int64_t rank = w.after->ne[0];
    if (w.n_joined > 1) {
        // One column for each of the rows that are joined, with zeros for the others.
        before = ggml_mul(c, columns_, ggml_reshape_4d(c, before, rank, 1, 1, n_streams_));
        before = ggml_reshape_2d(c, before, rank * w.n_joined, w.n_joined * n_streams_);
    }
    ggml_tensor * added = wide_product(c, w.joined, before);
    added = ggml_reshape_2d(c, added, w.after->ne[1], n_streams_);
    ggml_tensor * scale = parts.weights.scale_of(w.after);
    return scale != nullptr ? ggml_mul(c, added, scale) : added;
}

// The best token of each row, i32 [n_streams]: the best of each chunk, then the best chunk.
ggml_tensor * dspark_head::best_of(const head_parts & parts, ggml_tensor * rows) const {
    ggml_context * c = parts.nodes;
    const int64_t n_chunks = tokens_->ne[2];
    ggml_tensor * places = ggml_argmax(c, ggml_reshape_2d(c, rows, chunk_size_, n_chunks));
    places = ggml_reshape_2d(c, places, 1, n_chunks);
    ggml_tensor * peaks =
        ggml_get_rows(c, ggml_reshape_3d(c, rows, 1, chunk_size_, n_chunks), places);
    ggml_tensor * chunks =
        ggml_argmax(c, ggml_reshape_2d(c, peaks, n_chunks / n_streams_, n_streams_));
    ggml_tensor * tokens = ggml_get_rows(c, tokens_, places);
    if (n_streams_ > most_in_chunks || chunk_size_ == rows->ne[0] ||
        !supports(parts.backend, {places, peaks, tokens})) {
        return ggml_argmax(c, rows);
    }
    ggml_backend_tensor_alloc(buffer_.get(), tokens, found_);
    tokens = ggml_reshape_3d(c, tokens, 1, n_chunks / n_streams_, n_streams_);
    tokens = ggml_get_rows(c, tokens, ggml_reshape_2d(c, chunks, 1, n_streams_));
    return ggml_reshape_1d(c, tokens, n_streams_);
}

// Adds to the logits of each position, in place, what the best token of the one before is worth.
void dspark_head::follow_best(const head_parts & parts) const {
    ggml_context * c = parts.nodes;
    ggml_tensor * logits = parts.logits;
    ggml_tensor * before = parts.anchors;
    for (int i = 0; i < n_draft_; i++) {
        ggml_tensor * position = ggml_view_2d(c, logits, logits->ne[0], n_streams_, logits->nb[1],
                                              i * n_streams_ * logits->nb[1]);
        position = ggml_add_inplace(c, position, of_token_before(parts, before));
        ggml_build_forward_expand(parts.graph, position);
        if (i + 1 < n_draft_) {
            before = ggml_get_rows(c, parts.weights.markov.before, best_of(parts, position));
        }
    }
}

void dspark_head::build_steps(const head_parts & parts, ggml_tensor * scaled) {
    ggml_context * c = parts.nodes;
    const markov_weights & w = parts.weights.markov;
    const int64_t n_rows = parts.n_rows();
    candidates_.build(c, parts.backend, parts.scratch, scaled, top_k_,
                      parts.wanted == selection::on_device);
    raw_ = candidates_.logits;
    if (scaled != parts.logits) {
        const int64_t n = parts.logits->ne[0];
        raw_ = ggml_get_rows(c, ggml_reshape_3d(c, parts.logits, 1, n, n_rows), candidates_.ids);
        raw_ = ggml_reshape_2d(c, raw_, top_k_, n_rows);
    }
    const int64_t n_later = n_rows - n_streams_;
    if (n_later == 0) {
        return;
    }
    const size_t position = static_cast<size_t>(top_k_) * n_streams_ * sizeof(int32_t);
    const int64_t n_ids = top_k_ * n_later;
    ggml_tensor * rows = ggml_view_1d(c, candidates_.ids, n_ids, position);
    if (w.place_of_row != nullptr) {
        rows = ggml_reshape_1d(c, ggml_get_rows(c, w.place_of_row, rows), n_ids);
    }
    ggml_tensor * after = ggml_get_rows(c, w.after, rows);
    ggml_tensor * before = ggml_get_rows(c, w.before, ggml_view_1d(c, candidates_.ids, n_ids, 0));
    const int64_t rank = w.after->ne[0];
    steps_ = step_scores(c, ggml_reshape_3d(c, after, rank, top_k_, n_later),
                         ggml_reshape_3d(c, before, rank, top_k_, n_later));
    if (ggml_tensor * scale = parts.weights.scale_of(w.after)) {
        steps_ = ggml_mul(c, steps_, scale);
    }
}

void dspark_head::read(ggml_backend_t backend, const std::vector<int32_t> & anchors,
                       const draft_rows & out) {
    results_.fetch(backend);
    if (top_k_ == 1) {
        read_chains(backend, anchors, out);
    } else {
        read_lattices(anchors, out);
    }
}

void dspark_head::read_chains(ggml_backend_t backend, const std::vector<int32_t> & anchors,
                              const draft_rows & out) {
    output_.read(backend, n_streams_, out.ids, out.logprobs);
    for (int s = 0; s < n_streams_; s++) {
        int32_t before = anchors[s];
        for (int i = 0; i < n_draft_; i++) {
            weigh(s, i, before, out.logprobs + s * n_draft_ + i, 1);
            before = out.ids[s * n_draft_ + i];
        }
    }
}

void dspark_head::read_lattices(const std::vector<int32_t> & anchors,
                                const draft_rows & out) const {
    for (int s = 0; s < n_streams_; s++) {
        const size_t at = static_cast<size_t>(s) * n_draft_ * top_k_;
        const draft_rows rows = {out.ids + at, out.logprobs + at,
                                 out.steps != nullptr ? out.steps + at * top_k_ : nullptr};
        follow(lattice_of(s), anchors[s], top_k_, rows,
               [&](int position, int32_t before, float * logprobs, int k) {
                   weigh(s, position, before, logprobs, k);
               });
    }
}

// The graph's logits are those after the best token of the position before. What another token adds
// is known by the difference of the two steps.
draft_lattice dspark_head::lattice_of(int stream) const {
    const draft_params & p = weights_->params;
    const int k = top_k_;
    const auto * ids = results_.of<int32_t>(candidates_.ids);
    const auto * raw = results_.of<float>(raw_);
    const auto * sums = results_.of<float>(candidates_.sums);
    check_numbers(raw, int64_t{n_draft_} * n_streams_ * k);
    check_numbers(sums, int64_t{n_draft_} * n_streams_);
    draft_lattice lattice(n_draft_, k);
    int best = 0;  // of the position before
    for (int i = 0; i < n_draft_; i++) {
        const int row = i * n_streams_ + stream;
        const int32_t * of_row = ids + row * k;
        const float * logits = raw + row * k;
        std::copy_n(of_row, k, lattice.ids.data() + i * k);
        for (int a = 0; a < k; a++) {
            for (int b = 0; b < k; b++) {
                float logit = logits[b];
                if (i > 0) {
                    const float * steps =
                        results_.of<float>(steps_) + static_cast<size_t>(row - n_streams_) * k * k;
                    logit += steps[a * k + b] - steps[best * k + b];
                }
                lattice.score(i, a, b) = scaled_logit(p, logit);
            }
        }
        const float * after_best = &lattice.score(i, best, 0);
        const float peak = *std::max_element(after_best, after_best + k);
        double sum = 0.0;
        for (int b = 0; b < k; b++) {
            sum += std::exp(static_cast<double>(after_best[b] - peak));
        }
        lattice.log_mass.push_back(static_cast<float>(std::min(std::log(sum / sums[row]), 0.0)));
        best = 0;
        for (int b = 1; b < k; b++) {
            if (logits[b] > logits[best] ||
                (logits[b] == logits[best] && of_row[b] < of_row[best])) {
                best = b;
            }
        }
    }
    return lattice;
}

void dspark_head::weigh(int stream, int position, int32_t before, float * logprobs, int k) const {
    if (confidence_ == nullptr) {
        return;
    }
    if (position > 0 && !weights_->tokens.empty()) {
        before = weights_->tokens[before];
    }
    const float logit = results_.of<float>(confidence_)[position * n_streams_ + stream] +
                        weights_->markov.of_token[before];
    if (std::isnan(logit)) {
        refuse_numbers();
    }
    // log(sigmoid(x)) and log(1 - sigmoid(x)), without a loss where one is close to 0
    const auto log_sigmoid = [](double x) {
        return x > 0 ? -std::log1p(std::exp(-x)) : x - std::log1p(std::exp(x));
    };
    const auto accepted = static_cast<float>(log_sigmoid(logit));
    const double refused = log_sigmoid(-static_cast<double>(logit));
    const int best = static_cast<int>(std::max_element(logprobs, logprobs + k) - logprobs);
    const double rest = std::log(std::max(-std::expm1(static_cast<double>(logprobs[best])), 1e-12));
    for (int b = 0; b < k; b++) {
        const auto shared = static_cast<float>(logprobs[b] + refused - rest);
        logprobs[b] = b == best ? accepted : std::min(shared, accepted);
    }
}

}  // namespace dflash
