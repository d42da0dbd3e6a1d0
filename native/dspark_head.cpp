#include <algorithm>
#include <cmath>
#include <numeric>

#include "backend.h"
#include "chunks.h"
#include "draft_candidates.h"
#include "draft_head.h"
#include "draft_output.h"
#include "errors.h"
#include "host_mirror.h"
#include "wide_product.h"

namespace dflash {

namespace {

int64_t aligned(int64_t n) { return GGML_PAD(n, 64); }

// DSpark: a Markov head adds to the logits of each position what the token before it is worth,
// after[token] * before[token before]. The graph follows the best token from position to position.
// For trees it also scores the steps between the best candidates of adjacent positions.
//
// Position by position, that is a few small kernels for each, and the table of the head is read as
// often. With rounds of guesses it is done for all positions at once: the tokens before are
// guessed, and the best tokens after them are the guesses of the next round. The first guess is
// what the logits say by themselves. After n rounds the first n tokens are exact, and all of them
// if the last round has changed none.
//
// A head for the confidence says how likely the target accepts a position after its token before.
// Where there is one, that is the probability of the best candidate, and the others share the rest
// as the logits share it out.
class dspark_head : public draft_head {
  public:
    void build(const head_parts & parts) override;
    void read(ggml_backend_t backend, const std::vector<int32_t> & anchors,
              const draft_rows & out) override;

  private:
    void create_memory(const head_parts & parts);
    void place_logits(const head_parts & parts);
    ggml_tensor * of_tokens_before(const head_parts & parts, ggml_tensor * before) const;
    ggml_tensor * best_of(const head_parts & parts, ggml_tensor * rows) const;
    void follow_best(const head_parts & parts) const;
    ggml_tensor * follow_guesses(const head_parts & parts) const;
    void build_steps(const head_parts & parts, ggml_tensor * followed, ggml_tensor * scaled);
    void read_chains(ggml_backend_t backend, const std::vector<int32_t> & anchors,
                     const draft_rows & out);
    void read_lattices(const std::vector<int32_t> & anchors, const draft_rows & out) const;
    draft_lattice lattice_of(int stream) const;
    void weigh(int stream, int position, int32_t before, float * logprobs, int k) const;

    const draft_weights * weights_ = nullptr;
    int n_draft_ = 0;
    int n_streams_ = 0;
    int top_k_ = 0;
    bool is_guessed_ = false;
    draft_output output_;                 // of chains
    draft_candidates candidates_;         // of trees
    ggml_tensor * raw_ = nullptr;         // f32 [k, rows]: the candidates' logits, not scaled
    ggml_tensor * alone_ = nullptr;       // the same without what the token before is worth; may be
                                          // null
    ggml_tensor * steps_ = nullptr;       // f32 [k, k, rows after the first position]; may be null
    ggml_tensor * confidence_ = nullptr;  // f32 [1, rows]: what the state adds; may be null
    host_mirror results_;

    // Rows of logits are searched in chunks: an argmax of whole rows would keep little of a GPU
    // busy.
    int64_t chunk_size_ = 0;
    ggml_context_ptr constants_;
    ggml_backend_buffer_ptr buffer_;
    ggml_tensor * table_ = nullptr;  // f32 [chunk_size, chunks]: the tokens of each chunk
    char * found_ = nullptr;         // memory for the tokens of one chunk of each row

    // Of all graphs: for the logits, and for all rows of them but those of the last position.
    ggml_backend_buffer_t memory_ = nullptr;
    char * guessed_ = nullptr;
};

void dspark_head::build(const head_parts & parts) {
    weights_ = &parts.weights;
    n_draft_ = parts.n_draft;
    n_streams_ = parts.n_streams;
    top_k_ = parts.top_k;
    is_guessed_ = n_draft_ > 1 && parts.n_rounds > 0 && parts.n_rounds < parts.n_rows();
    ggml_context * c = parts.nodes;
    if (parts.weights.markov.confidence != nullptr) {
        confidence_ = ggml_mul_mat(c, parts.weights.markov.confidence, parts.states);
        ggml_prec_set_acc(confidence_, GGML_PREC_F32);
    }
    create_memory(parts);
    ggml_tensor * followed = parts.logits;
    if (is_guessed_) {
        followed = follow_guesses(parts);
    } else {
        follow_best(parts);
    }
    ggml_tensor * scaled = scaled_logits(c, parts.weights.params, followed);
    if (top_k_ > 1) {
        build_steps(parts, followed, scaled);
    }
    results_.place(parts.backend, parts.graph,
                   {candidates_.ids, raw_, alone_, candidates_.sums, steps_, confidence_});
    if (top_k_ == 1) {
        output_.build(c, parts.graph, parts.backend, parts.scratch, scaled, 1, parts.wanted);
    }
}

// On some backends the argmax of values that are not numbers is -1, and a lookup then reads what is
// before its table. That must be valid memory, and before a table of tokens it must be tokens, too.
void dspark_head::create_memory(const head_parts & parts) {
    const int64_t n_vocab = parts.logits->ne[0];
    chunk_size_ = chunk_of(n_vocab);
    const int64_t n_chunks = n_vocab / chunk_size_;
    const int64_t gap = aligned(chunk_size_);
    const int64_t begin_found = gap + aligned(n_vocab) + gap;
    constants_ = new_tensors(2);
    ggml_context * c = constants_.get();
    ggml_tensor * all =
        ggml_new_tensor_1d(c, GGML_TYPE_F32, begin_found + chunk_size_ * parts.n_rows());
    table_ = ggml_view_2d(c, all, chunk_size_, n_chunks, chunk_size_ * sizeof(float),
                          gap * sizeof(float));
    buffer_.reset(ggml_backend_alloc_ctx_tensors(c, parts.backend));
    if (!buffer_) {
        refuse_room(parts.backend, "the output of the draft graph");
    }
    ggml_backend_buffer_clear(buffer_.get(), 0);
    std::vector<float> tokens(n_vocab);
    std::iota(tokens.begin(), tokens.end(), 0.0f);
    ggml_backend_tensor_set(table_, tokens.data(), 0, tokens.size() * sizeof(float));
    found_ = static_cast<char *>(all->data) + begin_found * sizeof(float);
    place_logits(parts);
}

// Without guesses, a scale or a cap, the logits are what is searched in the end. Then the search
// places them behind a gap.
void dspark_head::place_logits(const head_parts & parts) {
    const draft_params & p = parts.weights.params;
    if (!is_guessed_ && p.logit_scale == 0.0f && p.logit_cap == 0.0f) {
        return;
    }
    // They may be the first columns of a wider product.
    ggml_tensor * logits =
        parts.logits->view_src != nullptr ? parts.logits->view_src : parts.logits;
    const int64_t gap = aligned(chunk_size_);
    const int64_t begin_guessed = gap + aligned(ggml_nelements(logits)) + gap;
    const int64_t n_guessed = is_guessed_ ? logits->ne[0] * (parts.n_rows() - n_streams_) : 0;
    memory_ = parts.scratch.head_buffer((begin_guessed + n_guessed) * sizeof(float));
    char * base = static_cast<char *>(ggml_backend_buffer_get_base(memory_));
    ggml_backend_tensor_alloc(memory_, logits, base + gap * sizeof(float));
    guessed_ = base + begin_guessed * sizeof(float);
}

// before: f32 [rank, n]. Returns f32 [rows of the head, n].
ggml_tensor * dspark_head::of_tokens_before(const head_parts & parts, ggml_tensor * before) const {
    ggml_tensor * after = parts.weights.markov.after;
    const int64_t n = before->ne[1];
    before = widened(parts.nodes, parts.backend, after, before);
    ggml_tensor * added = first_columns(parts.nodes, wide_product(parts.nodes, after, before), n);
    ggml_tensor * scale = parts.weights.scale_of(after);
    return scale != nullptr ? ggml_mul(parts.nodes, added, scale) : added;
}

// The best token of each row, i32 [rows]: the best chunk, then the best of it.
ggml_tensor * dspark_head::best_of(const head_parts & parts, ggml_tensor * rows) const {
    ggml_context * c = parts.nodes;
    const int64_t n = rows->ne[1];
    const best_place best = find_place(c, parts.backend, rows, chunk_size_);
    ggml_tensor * tokens = ggml_get_rows(c, table_, best.chunks);
    ggml_backend_tensor_alloc(buffer_.get(), tokens, found_);
    tokens = ggml_get_rows(c, ggml_reshape_3d(c, tokens, 1, chunk_size_, n),
                           ggml_reshape_2d(c, best.places, 1, n));
    return ggml_cast(c, ggml_reshape_1d(c, tokens, n), GGML_TYPE_I32);
}

// Adds to the logits of each position, in place, what the best token of the one before is worth.
void dspark_head::follow_best(const head_parts & parts) const {
    ggml_context * c = parts.nodes;
    ggml_tensor * logits = parts.logits;
    ggml_tensor * before = parts.anchors;
    for (int i = 0; i < n_draft_; i++) {
        ggml_tensor * position = ggml_view_2d(c, logits, logits->ne[0], n_streams_, logits->nb[1],
                                              i * n_streams_ * logits->nb[1]);
        position = ggml_add_inplace(c, position, of_tokens_before(parts, before));
        ggml_build_forward_expand(parts.graph, position);
        if (i + 1 < n_draft_) {
            before = ggml_get_rows(c, parts.weights.markov.before, best_of(parts, position));
        }
    }
}

// Returns the logits with what the tokens guessed last are worth, [rows of the head, rows].
ggml_tensor * dspark_head::follow_guesses(const head_parts & parts) const {
    ggml_context * c = parts.nodes;
    const int64_t n_rows = parts.n_rows();
    const auto first = [&](ggml_tensor * x, int64_t n) { return first_columns(c, x, n); };
    ggml_tensor * rows = first(parts.logits, n_rows - n_streams_);
    for (int round = 0; round < parts.n_rounds; round++) {
        const bool is_last = round + 1 == parts.n_rounds;
        ggml_tensor * before = ggml_get_rows(c, parts.weights.markov.before, best_of(parts, rows));
        before = ggml_concat(c, parts.anchors, before, 1);
        const int64_t n = is_last ? n_rows : n_rows - n_streams_;
        rows = ggml_add(c, of_tokens_before(parts, first(before, n)), first(parts.logits, n));
        if (!is_last) {
            ggml_backend_tensor_alloc(memory_, rows, guessed_);
        }
    }
    return rows;
}

void dspark_head::build_steps(const head_parts & parts, ggml_tensor * followed,
                              ggml_tensor * scaled) {
    ggml_context * c = parts.nodes;
    const markov_weights & w = parts.weights.markov;
    const int64_t n_rows = parts.n_rows();
    candidates_.build(c, parts.backend, parts.scratch, scaled, top_k_,
                      parts.wanted == selection::on_device);
    const auto of_candidates = [&](ggml_tensor * logits) {
        const int64_t n = logits->ne[0];
        ggml_tensor * found =
            ggml_get_rows(c, ggml_reshape_3d(c, logits, 1, n, n_rows), candidates_.ids);
        return ggml_reshape_2d(c, found, top_k_, n_rows);
    };
    raw_ = scaled != followed ? of_candidates(followed) : candidates_.logits;
    alone_ = is_guessed_ ? of_candidates(parts.logits) : nullptr;
    const int64_t n_later = n_rows - n_streams_;
    if (n_later == 0) {
        return;
    }
    const size_t position = static_cast<size_t>(top_k_) * n_streams_ * sizeof(int32_t);
    const int64_t n_ids = top_k_ * n_later;
    ggml_tensor * after =
        ggml_get_rows(c, w.after, ggml_view_1d(c, candidates_.ids, n_ids, position));
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
        follow(lattice_of(s), anchors[s], top_k_, out.of_block(s, n_draft_, top_k_),
               [&](int position, int32_t before, float * logprobs, int k) {
                   weigh(s, position, before, logprobs, k);
               });
    }
}

// The logits of a position are those after the best token of the position before, or after a guess
// at it. What another token adds is known by the steps from both.
draft_lattice dspark_head::lattice_of(int stream) const {
    const draft_params & p = weights_->params;
    const int k = top_k_;
    const auto * ids = results_.of<int32_t>(candidates_.ids);
    const auto * raw = results_.of<float>(raw_);
    const auto * alone = is_guessed_ ? results_.of<float>(alone_) : nullptr;
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
                    logit = alone != nullptr ? alone[row * k + b] + steps[a * k + b]
                                             : logit + steps[a * k + b] - steps[best * k + b];
                }
                lattice.score(i, a, b) = scaled_logit(p, logit);
            }
        }
        best = 0;
        for (int b = 1; b < k; b++) {
            if (logits[b] > logits[best] ||
                (logits[b] == logits[best] && of_row[b] < of_row[best])) {
                best = b;
            }
        }
        const float peak = scaled_logit(p, logits[best]);
        double sum = 0.0;
        for (int b = 0; b < k; b++) {
            sum += std::exp(static_cast<double>(scaled_logit(p, logits[b]) - peak));
        }
        lattice.log_mass.push_back(static_cast<float>(std::min(std::log(sum / sums[row]), 0.0)));
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

}  // namespace

std::unique_ptr<draft_head> make_dspark_head() { return std::make_unique<dspark_head>(); }

}  // namespace dflash
