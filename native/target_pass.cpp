#include "target_pass.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "backend.h"
#include "errors.h"
#include "largest.h"
#include "private_abi.h"
#include "router_products.h"
#include "target_tensors.h"

namespace dflash {

namespace {

// Rows that are searched at once. Each needs memory on the device for a copy of its logits.
constexpr int most_searched = 32;

// Whether the graph has llama.cpp's h_nextn. The heads of Gemma 4 are in a file of their own.
bool has_states_of_heads(const llama_model * model) {
    char architecture[64] = "";
    llama_model_meta_val_str(model, "general.architecture", architecture, sizeof(architecture));
    return llama_model_n_layer_nextn(model) > 0 || std::string(architecture) == "gemma4";
}

}  // namespace

// The functions that llama.cpp calls. There is a sampler for each sequence, all with the same pass.
struct target_pass::callbacks {
    static target_pass & pass(const llama_sampler * s) {
        return *static_cast<target_pass *>(s->ctx);
    }

    static const char * name(const llama_sampler *) { return "dflash"; }
    static void apply(llama_sampler *, llama_token_data_array *) {}
    static void free(llama_sampler *) {}  // the sampler does not own the pass

    static bool init(llama_sampler *, ggml_backend_buffer_type_t, uint32_t) { return true; }

    static void reset(llama_sampler * s) { pass(s).is_built_ = false; }

    static void build(llama_sampler * s, ggml_context * nodes, ggml_cgraph * graph,
                      llama_sampler_data * data) {
        // A view of one row of a padded copy of the logits. The output rows come first in it.
        const ggml_tensor * padded = data->logits->view_src;
        ggml_tensor * all = padded != nullptr ? padded->src[0] : nullptr;
        data->logits = nullptr;  // nothing for llama.cpp to copy to the host
        target_pass & p = pass(s);
        if (all != nullptr && !p.is_built_) {
            p.is_built_ = true;
            p.build(nodes, graph, all);
        }
    }

    static llama_sampler_i & interface() {
        static llama_sampler_i table = {name,
                                        /*accept=*/nullptr,
                                        apply,
                                        /*reset=*/nullptr,
                                        /*clone=*/nullptr,
                                        free,
                                        init,
                                        /*backend_accept=*/nullptr,
                                        build,
                                        /*backend_set_input=*/nullptr,
                                        reset,
                                        /*copy_state=*/nullptr};
        return table;
    }
};

target_pass::target_pass(llama_context * ctx, int n_seq, std::vector<int32_t> layers, int n_stored,
                         bool in_graph, int n_branches, std::unique_ptr<state_replay> replay)
    : ctx_(ctx),
      n_seq_(n_seq),
      n_ids_(n_seq * n_branches),
      n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)))),
      n_embd_(llama_model_n_embd_out(llama_get_model(ctx))),
      layers_(std::move(layers)),
      in_graph_(in_graph),
      replay_(std::move(replay)),
      too_many_(n_vocab_ + 1) {
    const int n_layer = llama_model_n_layer(llama_get_model(ctx));
    const int last = n_layer - (has_states_of_heads(llama_get_model(ctx)) ? 0 : 1);
    for (const int32_t layer : layers_) {
        if (layer > last || (layer < 1 && layer != n_layer)) {  // an assistant has only heads
            throw std::invalid_argument("cannot tap the input of layer " + std::to_string(layer) +
                                        "; the target offers 1 .. " + std::to_string(last));
        }
    }
    if (!in_graph_) {
        if (!layers_.empty()) {
            throw std::invalid_argument(
                "several sequences of this target cannot be tapped in one batch");
        }
        return;
    }
    const ggml_backend_dev_t device = target_tensors::find(llama_get_model(ctx)).device();
    on_host_ = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
    if (!layers_.empty()) {
        // llama.cpp reserves memory for a batch that is rounded up to a multiple of the ids.
        const auto most_rows = static_cast<int>(llama_n_batch(ctx_) + llama_n_seq_max(ctx_)) - 1;
        store_ = std::make_shared<tap_store>(device, static_cast<int>(layers_.size()) * n_embd_,
                                             n_stored, most_rows);
    }
    for (int id = 0; id < n_ids_; id++) {
        llama_sampler * chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
        chains_.emplace_back(chain);
        llama_sampler_chain_add(chain, llama_sampler_init(&callbacks::interface(), this));
        if (!llama_set_sampler(ctx_, id, chain)) {
            throw backend_error("llama.cpp does not let its graph of this target be extended");
        }
    }
}

void target_pass::build(ggml_context * nodes, ggml_cgraph * graph, ggml_tensor * logits) {
    n_rebuilds_++;
    if (replay_) {
        replay_->mark(nodes, graph);
    }
    if (on_host_) {
        multiply_routers_by_row(nodes, graph);
    }
    graph_logits_ = logits;
    ggml_set_output(logits);
    if (!on_host_) {
        graph_best_ = ggml_argmax(nodes, logits);
        ggml_set_output(graph_best_);
        ggml_build_forward_expand(graph, graph_best_);
    }
    for (size_t k = 0; k < layers_.size(); k++) {
        // The input of a layer is the output of the layer before. llama.cpp names it l_out.
        const bool is_last = layers_[k] == llama_model_n_layer(llama_get_model(ctx_));
        const std::string name = is_last ? "h_nextn" : "l_out-" + std::to_string(layers_[k] - 1);
        ggml_tensor * state = ggml_graph_get_tensor(graph, name.c_str());
        const bool fits = state != nullptr && state->ne[0] == n_embd_ &&
                          ggml_nrows(state) == state->ne[1] && state->ne[1] <= store_->cells->ne[0];
        if (!fits) {
            missing_ = name;  // llama.cpp does not expect exceptions here
            continue;
        }
        n_tapped_ = state->ne[1];
        ggml_tensor * states = store_->states;
        ggml_tensor * place = ggml_view_2d(nodes, states, n_embd_, states->ne[1], states->nb[1],
                                           k * n_embd_ * sizeof(float));
        ggml_tensor * cells = ggml_view_1d(nodes, store_->cells, state->ne[1], 0);
        ggml_build_forward_expand(graph, ggml_set_rows(nodes, place, state, cells));
    }
}

void target_pass::check(const batch_row & row) const {
    if (row.seq < 0 || row.seq >= n_seq_) {
        throw std::invalid_argument("there is no sequence " + std::to_string(row.seq) +
                                    " among the " + std::to_string(n_seq_) + " of this target");
    }
    const bool is_known = std::all_of(row.ids.begin(), row.ids.end(),
                                      [&](int32_t id) { return id >= 0 && id < n_ids_; });
    if (!is_known || row.ids.size() > static_cast<size_t>(n_ids_)) {
        throw std::invalid_argument("a row with ids that this target has not; it has " +
                                    std::to_string(n_ids_));
    }
}

void target_pass::check_size(size_t n) const {
    const size_t most = llama_n_batch(ctx_);
    if (n == 0 || n > most) {  // llama.cpp asserts it
        throw std::invalid_argument("a pass of " + std::to_string(n) + " rows; expected 1 to " +
                                    std::to_string(most));
    }
}

int target_pass::decode(const std::vector<batch_row> & rows, const float * states) {
    check_size(rows.size());
    const auto n = static_cast<int32_t>(rows.size());
    std::vector<int32_t> tokens, positions, seqs, n_ids;
    std::vector<std::vector<int32_t>> ids;
    std::vector<int32_t *> first_ids;
    std::vector<int8_t> output;
    for (const batch_row & row : rows) {
        check(row);
        tokens.push_back(row.token);
        positions.push_back(row.position);
        seqs.push_back(row.seq);
        ids.push_back(
            private_abi::leading_first(row.ids.empty() ? std::vector<int32_t>{row.seq} : row.ids));
        n_ids.push_back(static_cast<int32_t>(ids.back().size()));
        first_ids.push_back(ids.back().data());
        output.push_back(row.output ? 1 : 0);
    }
    const llama_batch batch{n,
                            tokens.data(),
                            const_cast<float *>(states),
                            positions.data(),
                            n_ids.data(),
                            first_ids.data(),
                            output.data()};
    const auto n_outputs = static_cast<int>(std::count(output.begin(), output.end(), 1));
    const int status = run(batch, n_outputs);
    if (status == 0 && replay_) {
        can_keep_ = replay_->end_pass(seqs, positions);
    }
    return status;
}

int target_pass::decode_embeddings(const float * rows, int n, std::vector<int32_t> positions,
                                   int32_t seq, bool is_causal) {
    check_size(n);
    check({0, 0, seq, false});
    const llama_rope_type rope = llama_model_rope_type(llama_get_model(ctx_));
    const bool is_mrope = rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE;
    if (positions.size() != static_cast<size_t>(n) * (is_mrope ? 4 : 1)) {
        throw std::invalid_argument("each row has one position, with M-RoPE four");
    }
    std::vector<int32_t> n_ids(n, 1);
    std::vector<int32_t *> ids(n, &seq);
    std::vector<int8_t> output(n, 0);
    const llama_batch batch{n,
                            /*token=*/nullptr,
                            const_cast<float *>(rows),  // llama.cpp only reads them
                            positions.data(),
                            n_ids.data(),
                            ids.data(),
                            output.data()};
    struct attention {
        llama_context * ctx;
        ~attention() { llama_set_causal_attn(ctx, true); }
    };
    llama_set_causal_attn(ctx_, is_causal);
    const attention back{ctx_};
    return run(batch, 0);
}

int target_pass::run(const llama_batch & batch, int n_outputs) {
    const int32_t n = batch.n_tokens;
    n_outputs_ = 0;  // until all of them are known to be there
    best_.clear();
    search_.forget();
    if (most_candidates_now_ > 0) {
        most_candidates_ = std::exchange(most_candidates_now_, 0);
    }
    if (store_) {  // also for a pass that fails: it may have overwritten the oldest rows
        first_stored_ = store_->begin(n);
    }
    can_keep_ = false;
    if (replay_) {
        replay_->begin_pass();
    }
    const int status = llama_decode(ctx_, batch);
    if (status != 0) {
        return status;
    }
    llama_synchronize(ctx_);
    if (in_graph_ && n_outputs > 0 && graph_logits_ == nullptr) {
        throw backend_error("this target puts out no logits; give a language model");
    }
    if (!missing_.empty()) {
        throw backend_error("llama.cpp's graph of this target has no tensor " + missing_ +
                            " to tap, a row for each token; load without a drafter");
    }
    // If the batch is split, only the last part has its rows in the graph's tensors.
    const bool is_of_heads = batch.token != nullptr && batch.embd != nullptr;
    const bool is_split = (n_outputs > 0 && in_graph_ && graph_logits_->ne[1] != n_outputs) ||
                          (store_ && n_tapped_ != n && !(is_of_heads && n_tapped_ == n_outputs));
    if (is_split) {
        throw backend_error("llama.cpp has split a batch of " + std::to_string(n) +
                            " rows of this target; load it with one sequence");
    }
    n_outputs_ = n_outputs;
    return 0;
}

void target_pass::keep(int32_t seq, int32_t n_kept) {
    if (!can_keep_) {
        throw std::invalid_argument("the rows of the last pass cannot be taken back");
    }
    replay_->keep(seq, n_kept);
}

void target_pass::start_replay() {
    if (replay_) {
        replay_->start();
    }
}

void target_pass::wait() {
    if (replay_) {
        replay_->wait();
    }
}

int target_pass::decode_ahead(std::vector<batch_row> rows, int n_steps,
                              const std::vector<token_draw *> & draws,
                              const std::vector<int32_t> & given, std::vector<int32_t> & out) {
    if (draws.size() != rows.size()) {
        throw std::invalid_argument("each sequence has its own way to draw");
    }
    if (!given.empty() && given.size() < rows.size() * static_cast<size_t>(n_steps)) {
        throw std::invalid_argument("each step gives one token to each sequence, or none does");
    }
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(ctx_));
    const int64_t first = store_ ? store_->n_written() : 0;
    bool ended = false;
    for (int step = 0; step < n_steps && !ended; step++) {
        const int status = decode(rows);
        if (status != 0) {
            return status;
        }
        for (size_t i = 0; i < rows.size(); i++) {
            const int32_t drawn = draw(draws[i], static_cast<int>(i));
            const bool is_given = !given.empty() && drawn >= 0;
            const int32_t token = is_given ? given[step * rows.size() + i] : drawn;
            rows[i].token = token;
            rows[i].position++;
            ended = ended || token < 0 || llama_vocab_is_eog(vocab, token);
            out.push_back(token);
        }
    }
    first_stored_ = first;
    return 0;
}

int32_t target_pass::best(int output_row) {
    check_output(output_row);
    if (!in_graph_ || on_host_) {
        return largest_of(row_on_host(output_row), n_vocab_);
    }
    if (best_.empty()) {
        best_.resize(n_outputs_);
        ggml_backend_tensor_get(graph_best_, best_.data(), 0, best_.size() * sizeof(int32_t));
    }
    return best_[output_row];
}

int32_t target_pass::draw(token_draw * how, int output_row) {
    check_output(output_row);
    if (how != nullptr && how->rule().n_vocab != n_vocab_) {
        throw std::invalid_argument("a draw from " + std::to_string(how->rule().n_vocab) +
                                    " tokens; the target has " + std::to_string(n_vocab_));
    }
    const auto begin = std::chrono::steady_clock::now();
    const int32_t token = how == nullptr ? best(output_row) : draw_from(*how, output_row);
    if (how != nullptr) {
        how->settle(token);
    }
    draw_s_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return token;
}

int32_t target_pass::draw_from(token_draw & how, int output_row) {
    int32_t token = token_draw::needs_whole_row;
    switch (how.needs()) {
        case draw_needs::best: return draw_best(how, output_row);
        case draw_needs::sums: token = draw_from_sums(how, output_row); break;
        case draw_needs::candidates_and_sum:
            // On the host, adding up the row costs as much as drawing from it.
            if (search(output_row, how.rule().n_candidates)) {
                token = draw_from_candidates(how, output_row);
            }
            break;
        case draw_needs::candidates: token = draw_from_candidates(how, output_row); break;
        case draw_needs::row: break;
    }
    if (token != token_draw::needs_whole_row) {
        return token;
    }
    n_whole_rows_++;
    const float * row = row_on_host(output_row);
    return largest_of(row, n_vocab_) < 0 ? token_draw::not_finite : how.from_row(row);
}

int32_t target_pass::draw_best(const token_draw & how, int output_row) {
    if (how.is_first() && largest_of(row_on_host(output_row), n_vocab_) < 0) {
        return token_draw::not_finite;
    }
    return best(output_row);
}

int32_t target_pass::draw_from_sums(token_draw & how, int output_row) {
    if (!search(output_row, 1, how.rule().temperature)) {
        return token_draw::needs_whole_row;
    }
    int32_t best = 0;
    float peak = 0.0f;
    if (!search_.read(output_row, 1, &best, &peak)) {
        return token_draw::not_finite;
    }
    const auto size = static_cast<int32_t>(search_.chunk_size());
    const int32_t chunk = how.chunk_of(search_.chunk_sums(output_row), n_vocab_ / size, peak);
    if (chunk < 0) {
        return chunk;
    }
    std::vector<float> logits(size);
    const size_t begin = static_cast<size_t>(output_row) * n_vocab_ + chunk * size;
    ggml_backend_tensor_get(graph_logits_, logits.data(), begin * sizeof(float),
                            logits.size() * sizeof(float));
    const int32_t place = how.from_chunk(logits.data(), size);
    return place < 0 ? place : chunk * size + place;
}

int32_t target_pass::draw_from_candidates(token_draw & how, int output_row) {
    const int n = how.rule().n_candidates;
    std::vector<int32_t> ids(n);
    std::vector<float> logits(n);
    if (!find_candidates(output_row, n, ids.data(), logits.data())) {
        return token_draw::not_finite;
    }
    const bool takes_sum = how.needs() == draw_needs::candidates_and_sum;
    const double sum = takes_sum ? log_sum(output_row) : NAN;
    const int32_t token = how.from_candidates(ids.data(), logits.data(), n, sum);
    if (token != token_draw::needs_order) {
        return token;
    }
    n_whole_rows_++;
    return how.in_order_of(row_on_host(output_row));
}

void target_pass::check_output(int output_row) const {
    if (output_row < 0 || output_row >= n_outputs_) {
        throw std::invalid_argument("output row " + std::to_string(output_row) +
                                    " is not in the last pass of " + std::to_string(n_outputs_));
    }
}

const float * target_pass::row_on_host(int output_row) {
    check_output(output_row);
    const size_t offset = static_cast<size_t>(output_row) * n_vocab_;
    if (!in_graph_) {
        return llama_get_logits(ctx_) + offset;
    }
    if (ggml_backend_buffer_is_host(graph_logits_->buffer)) {
        return static_cast<const float *>(graph_logits_->data) + offset;
    }
    const size_t n = static_cast<size_t>(n_vocab_) * sizeof(float);
    if (!staged_) {
        staged_.reset(
            ggml_backend_buft_alloc_buffer(host_buffer_type(device_of(graph_logits_->buffer)), n));
        if (!staged_) {
            throw backend_error("no room on the host for a row of logits");
        }
    }
    void * staged = ggml_backend_buffer_get_base(staged_.get());
    ggml_backend_tensor_get(graph_logits_, staged, offset * sizeof(float), n);
    return static_cast<const float *>(staged);
}

std::vector<float> target_pass::logits(int output_row) {
    const float * row = row_on_host(output_row);
    return {row, row + n_vocab_};
}

void target_pass::candidates(int output_row, int k, std::vector<int32_t> & ids,
                             std::vector<float> & logits) {
    if (k < 1 || k > n_vocab_) {
        throw std::invalid_argument(std::to_string(k) + " candidates of " +
                                    std::to_string(n_vocab_) + " tokens");
    }
    ids.resize(k);
    logits.resize(k);
    if (!find_candidates(output_row, k, ids.data(), logits.data())) {
        throw not_finite_error(
            "the target's logits are not finite numbers; the model file is damaged, or this "
            "llama.cpp computes it wrongly: try flash_attn=False or the CPU");
    }
}

bool target_pass::find_candidates(int output_row, int k, int32_t * ids, float * logits) {
    return search(output_row, k) ? search_.read(output_row, k, ids, logits)
                                 : largest_of(row_on_host(output_row), n_vocab_, k, ids, logits);
}

double target_pass::log_sum(int output_row) {
    check_output(output_row);
    if (search_.has(output_row, 0)) {
        return search_.log_sum(output_row);
    }
    const float * row = row_on_host(output_row);
    const double peak = *std::max_element(row, row + n_vocab_);
    const double sum = std::accumulate(
        row, row + n_vocab_, 0.0, [=](double sum, float x) { return sum + std::exp(x - peak); });
    return peak + std::log(sum);
}

// Whether the device has found the k candidates of this row, and its sums at a temperature.
bool target_pass::search(int output_row, int k, float temperature) {
    check_output(output_row);
    const bool on_device = in_graph_ && k < too_many_ &&
                           (search_on_cpu || !ggml_backend_buffer_is_host(graph_logits_->buffer));
    if (!on_device) {
        return false;
    }
    most_candidates_now_ = std::max(most_candidates_now_, k);
    if (search_.has(output_row, k, temperature)) {
        return true;
    }
    // Sequences ask for different numbers; most likely for the same ones as after the last pass.
    const bool more = !search_.sums_alike && most_candidates_ < too_many_;
    const int wanted = more ? std::max(k, most_candidates_) : k;
    const int first = output_row / most_searched * most_searched;
    const int n = std::min(most_searched, n_outputs_ - first);
    if (!search_.find(*graph_logits_, first, n, wanted, temperature)) {
        too_many_ = wanted;
        return search(output_row, k, temperature);
    }
    return true;
}

}  // namespace dflash
