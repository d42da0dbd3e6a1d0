#include "draft_output.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "chunks.h"
#include "largest.h"
#include "no_number.h"
#include "top_k.h"

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
    }
    for (ggml_tensor * result : {chunks_, places_, normaliser_, few_, few_rows_, best_, values_,
                                 ids_, logprobs_, logits_}) {
        if (result != nullptr) {
            ggml_set_output(result);
            ggml_build_forward_expand(graph, result);
        }
    }
    results_.place(
        backend, {chunks_, places_, normaliser_, few_, few_rows_, best_, values_, ids_, logprobs_});
}

// Finds the peak of each chunk, the best of these, then its place in its chunk. The best of the
// row, M, has the probability 1 / sum(exp(x - M)).
bool draft_output::build_best(ggml_context * c, ggml_backend_t backend, draft_scratch & scratch,
                              ggml_tensor * logits) {
    const int64_t size = chunk_of(n_vocab_);
    const int64_t n = n_vocab_ / size;
    ggml_tensor * peaks = peaks_of(c, backend, logits, size);
    ggml_tensor * chunks = ggml_argmax(c, peaks);
    ggml_tensor * columns = ggml_reshape_2d(c, chunks, 1, n_rows_);
    ggml_tensor * chunk = ggml_get_rows(c, ggml_reshape_3d(c, logits, size, n, n_rows_), columns);
    ggml_tensor * places = ggml_argmax(c, ggml_reshape_2d(c, chunk, size, n_rows_));
    const auto exps = sum_exps(c, backend, logits, peaks, columns);
    if (!exps || !supports(backend, {peaks, chunks, chunk, places})) {
        return false;
    }
    scratch.place_guarded(backend, chunk_of(n_vocab_), {logits, peaks});
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
    scratch.place_guarded(backend, chunk_of(n_vocab_), {logits, chunks->peaks});
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

void draft_output::read(ggml_backend_t backend, int32_t * ids, float * logprobs) {
    results_.fetch(backend);
    if (best_ != nullptr) {
        read_best_of_few(ids, logprobs);
    } else if (few_ != nullptr) {
        read_chunks(ids, logprobs);
    } else if (chunks_ != nullptr) {
        read_best(ids, logprobs);
    } else if (ids_ != nullptr) {
        read_top_k(ids, logprobs);
    } else {
        read_logits(ids, logprobs);
    }
}

void draft_output::read(ggml_backend_t backend, int n_streams, int32_t * ids, float * logprobs) {
    if (n_streams == 1) {
        read(backend, ids, logprobs);
        return;
    }
    const size_t n = n_rows_ * top_k_;
    std::vector<int32_t> all_ids(n);
    std::vector<float> all_logprobs(n);
    read(backend, all_ids.data(), all_logprobs.data());
    const int64_t n_positions = n_rows_ / n_streams;
    for (int64_t row = 0; row < n_rows_; row++) {
        const int64_t to = (row % n_streams * n_positions + row / n_streams) * top_k_;
        std::copy_n(all_ids.data() + row * top_k_, top_k_, ids + to);
        std::copy_n(all_logprobs.data() + row * top_k_, top_k_, logprobs + to);
    }
}

void draft_output::read_best(int32_t * ids, float * logprobs) const {
    const auto * chunks = results_.of<int32_t>(chunks_);
    const auto * places = results_.of<int32_t>(places_);
    const auto * normaliser = results_.of<float>(normaliser_);
    check_numbers(normaliser, n_rows_);
    for (int64_t i = 0; i < n_rows_; i++) {
        ids[i] = static_cast<int32_t>(chunks[i] * chunk_size_ + places[i]);
        logprobs[i] = -std::log(normaliser[i]);
    }
}

void draft_output::read_best_of_few(int32_t * ids, float * logprobs) const {
    const auto * few = results_.of<int32_t>(few_);
    const auto * best = results_.of<int32_t>(best_);
    const auto * values = results_.of<float>(values_);
    const auto * normaliser = results_.of<float>(normaliser_);
    check_numbers(normaliser, n_rows_);
    const int k = top_k_;
    const auto size = static_cast<int>(chunk_size_);
    for (int64_t i = 0; i < n_rows_; i++, few += k, best += k, values += k) {
        const float norm = std::log(normaliser[i]) + values[0];
        for (int j = 0; j < k; j++) {
            ids[i * k + j] = few[best[j] / size] * size + best[j] % size;
            logprobs[i * k + j] = values[j] - norm;
        }
        sort_best_first(ids + i * k, logprobs + i * k, k);
    }
}

void draft_output::read_chunks(int32_t * ids, float * logprobs) const {
    const auto * few = results_.of<int32_t>(few_);
    const auto * rows = results_.of<float>(few_rows_);
    const auto * normaliser = results_.of<float>(normaliser_);
    check_numbers(normaliser, n_rows_);
    const int k = top_k_;
    const auto size = static_cast<int>(chunk_size_);
    std::vector<int> order(k);
    // Chunks go in by their lowest id, so that equal logits come out by id.
    std::vector<float> logits(static_cast<size_t>(k) * size);
    for (int64_t i = 0; i < n_rows_; i++, few += k, ids += k, logprobs += k) {
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](int a, int b) { return few[a] < few[b]; });
        for (int j = 0; j < k; j++) {
            std::copy_n(rows + (i * k + order[j]) * size, size, logits.data() + j * size);
        }
        if (!largest_of(logits.data(), k * size, k, ids, logprobs)) {
            refuse_numbers();
        }
        const float norm = std::log(normaliser[i]) + logprobs[0];
        for (int j = 0; j < k; j++) {
            ids[j] = few[order[ids[j] / size]] * size + ids[j] % size;
            logprobs[j] -= norm;
        }
    }
}

void draft_output::read_top_k(int32_t * ids, float * logprobs) const {
    check_numbers(results_.of<float>(logprobs_), n_rows_ * top_k_);
    std::copy_n(results_.of<int32_t>(ids_), n_rows_ * top_k_, ids);
    std::copy_n(results_.of<float>(logprobs_), n_rows_ * top_k_, logprobs);
    for (int64_t i = 0; i < n_rows_; i++) {
        sort_best_first(ids + i * top_k_, logprobs + i * top_k_, top_k_);
    }
}

void draft_output::read_logits(int32_t * ids, float * logprobs) const {
    std::vector<float> row(n_vocab_);
    for (int64_t i = 0; i < n_rows_; i++) {
        const size_t n = row.size() * sizeof(float);
        ggml_backend_tensor_get(logits_, row.data(), i * n, n);
        check_numbers(row.data(), n_vocab_);
        top_k_of(row, top_k_, ids + i * top_k_, logprobs + i * top_k_);
    }
}

}  // namespace dflash
