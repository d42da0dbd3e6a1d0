#include "draft_output.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "backend.h"
#include "chunks.h"
#include "errors.h"
#include "largest.h"

namespace dflash {

void draft_output::build(ggml_context * nodes, ggml_cgraph * graph, ggml_backend_t backend,
                         draft_scratch & scratch, ggml_tensor * logits, int top_k,
                         selection wanted) {
    top_k_ = top_k;
    n_vocab_ = logits->ne[0];
    n_rows_ = logits->ne[1];
    const bool found = wanted != selection::on_host &&
                       (top_k == 1 ? build_best(nodes, backend, scratch, logits)
                                   : build_chunks(nodes, backend, scratch, logits,
                                                  wanted == selection::on_device) ||
                                         build_top_k(nodes, backend, logits));
    if (!found) {
        logits_ = logits;
        ggml_set_output(logits_);
        ggml_build_forward_expand(graph, logits_);
    }
    results_.place(
        backend, graph,
        {chunks_, places_, normaliser_, few_, few_rows_, best_, values_, ids_, logprobs_});
}

// Finds the peak of each chunk, the best of these, then its place in its chunk. The best of the
// row, M, has the probability 1 / sum(exp(x - M)).
bool draft_output::build_best(ggml_context * c, ggml_backend_t backend, draft_scratch & scratch,
                              ggml_tensor * logits) {
    const int64_t size = chunk_of(n_vocab_);
    const auto [peaks, chunks, chunk, places] = find_place(c, backend, logits, size);
    const auto exps = sum_exps(c, backend, logits, peaks, ggml_reshape_2d(c, chunks, 1, n_rows_));
    if (!exps || !supports(backend, {peaks, chunks, chunk, places})) {
        return false;
    }
    scratch.place_guarded(size, {logits, peaks});
    chunk_size_ = size;
    chunks_ = chunks;
    places_ = places;
    normaliser_ = exps->sums;
    return true;
}

bool draft_output::build_chunks(ggml_context * c, ggml_backend_t backend, draft_scratch & scratch,
                                ggml_tensor * logits, bool on_device) {
    const auto chunks = find_chunks(c, backend, logits, top_k_);
    if (!chunks) {
        return false;
    }
    scratch.place_guarded(chunk_of(n_vocab_), {logits, chunks->peaks});
    chunk_size_ = chunks->size;
    few_ = chunks->few;
    few_rows_ = chunks->rows;
    normaliser_ = chunks->exps.sums;
    if (on_device) {
        // Only the best of these few come to the host. Reading all of them would take the host as
        // long as a layer of a small drafter.
        if (const auto found = find_best(c, backend, *chunks)) {
            best_ = found->places;
            values_ = found->values;
            few_rows_ = nullptr;
        }
    }
    return true;
}

// Softmax and sort of whole rows.
bool draft_output::build_top_k(ggml_context * c, ggml_backend_t backend, ggml_tensor * logits) {
    ggml_tensor * best = ggml_top_k(c, logits, top_k_);
    ggml_tensor * p_all = ggml_reshape_3d(c, ggml_soft_max(c, logits), 1, n_vocab_, n_rows_);
    ggml_tensor * p_best = ggml_get_rows(c, p_all, best);
    ggml_tensor * log_p = ggml_log(c, p_best);
    if (!supports(backend, {best, p_best, log_p})) {
        return false;
    }
    ids_ = best;
    logprobs_ = log_p;
    return true;
}

void draft_output::read(ggml_backend_t backend, int n_streams, int32_t * ids, float * logprobs) {
    results_.fetch(backend);
    if (normaliser_ != nullptr) {
        check_numbers(results_.of<float>(normaliser_), n_rows_);
    }
    const int64_t n_positions = n_rows_ / n_streams;
    for (int64_t row = 0; row < n_rows_; row++) {
        const int64_t to = (row % n_streams * n_positions + row / n_streams) * top_k_;
        if (best_ != nullptr) {
            read_best_of_few(row, ids + to, logprobs + to);
        } else if (few_ != nullptr) {
            read_chunks(row, ids + to, logprobs + to);
        } else if (chunks_ != nullptr) {
            read_best(row, ids + to, logprobs + to);
        } else if (ids_ != nullptr) {
            read_top_k(row, ids + to, logprobs + to);
        } else {
            read_logits(row, ids + to, logprobs + to);
        }
    }
}

void draft_output::read_best(int64_t row, int32_t * ids, float * logprobs) const {
    const int32_t chunk = results_.of<int32_t>(chunks_)[row];
    *ids = static_cast<int32_t>(chunk * chunk_size_ + results_.of<int32_t>(places_)[row]);
    *logprobs = -std::log(results_.of<float>(normaliser_)[row]);
}

void draft_output::read_best_of_few(int64_t row, int32_t * ids, float * logprobs) const {
    const int k = top_k_;
    const auto * values = results_.of<float>(values_) + row * k;
    read_ids(results_.of<int32_t>(few_) + row * k, results_.of<int32_t>(best_) + row * k, values,
             chunk_size_, k, ids);
    const float norm = std::log(results_.of<float>(normaliser_)[row]) + values[0];
    std::transform(values, values + k, logprobs, [norm](float logit) { return logit - norm; });
}

void draft_output::read_chunks(int64_t row, int32_t * ids, float * logprobs) const {
    const int k = top_k_;
    const auto size = static_cast<int>(chunk_size_);
    const auto * few = results_.of<int32_t>(few_) + row * k;
    const auto * rows = results_.of<float>(few_rows_) + row * k * size;
    // Chunks go in by their lowest id, so that equal logits come out by id.
    std::vector<int> order(k);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) { return few[a] < few[b]; });
    std::vector<float> logits;
    for (const int chunk : order) {
        logits.insert(logits.end(), rows + chunk * size, rows + (chunk + 1) * size);
    }
    if (!largest_of(logits.data(), k * size, k, ids, logprobs)) {
        refuse_numbers();
    }
    const float norm = std::log(results_.of<float>(normaliser_)[row]) + logprobs[0];
    for (int j = 0; j < k; j++) {
        ids[j] = few[order[ids[j] / size]] * size + ids[j] % size;
        logprobs[j] -= norm;
    }
}

void draft_output::read_top_k(int64_t row, int32_t * ids, float * logprobs) const {
    std::copy_n(results_.of<int32_t>(ids_) + row * top_k_, top_k_, ids);
    std::copy_n(results_.of<float>(logprobs_) + row * top_k_, top_k_, logprobs);
    check_numbers(logprobs, top_k_);
    sort_best_first(ids, logprobs, top_k_);
}

void draft_output::read_logits(int64_t row, int32_t * ids, float * logprobs) const {
    std::vector<float> logits(n_vocab_);
    const size_t n = logits.size() * sizeof(float);
    ggml_backend_tensor_get(logits_, logits.data(), row * n, n);
    check_numbers(logits.data(), n_vocab_);
    top_k_of(logits, top_k_, ids, logprobs);
}

}  // namespace dflash
