#include "draft_output.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "errors.h"
#include "top_k.h"

namespace dflash {

namespace {

// Rows of a vocabulary are few for a GPU and long: chunks of this size keep all of it at work.
constexpr int64_t wanted_chunk = 128;

int64_t chunk_of(int64_t n_vocab) {
    for (int64_t size = wanted_chunk; size >= 32; size /= 2) {
        if (n_vocab % size == 0) {
            return size;
        }
    }
    return n_vocab;
}

// Sorting needs numbers, and drafts made of anything else are no drafts.
void check_numbers(const std::vector<float> & values) {
    if (std::any_of(values.begin(), values.end(), [](float x) { return std::isnan(x); })) {
        throw backend_error(
            "the drafter's output is not a number; fetch its file again, or load without a "
            "drafter");
    }
}

template <typename T>
std::vector<T> fetch(ggml_backend_t backend, const ggml_tensor * tensor) {
    std::vector<T> values(ggml_nelements(tensor));
    ggml_backend_tensor_get_async(backend, tensor, values.data(), 0, values.size() * sizeof(T));
    return values;
}

}  // namespace

void draft_output::build(ggml_context * nodes, ggml_cgraph * graph, ggml_backend_t backend,
                         ggml_tensor * logits, int top_k, bool on_device) {
    top_k_ = top_k;
    n_vocab_ = logits->ne[0];
    n_rows_ = logits->ne[1];
    const bool found = on_device && (top_k == 1 ? build_best(nodes, backend, logits)
                                                : build_chunks(nodes, backend, logits) ||
                                                      build_top_k(nodes, backend, logits));
    if (!found) {
        logits_ = logits;
    }
    for (ggml_tensor * result :
         {chunks_, places_, normaliser_, few_, few_rows_, ids_, logprobs_, logits_}) {
        if (result != nullptr) {
            ggml_set_output(result);
            ggml_build_forward_expand(graph, result);
        }
    }
}

// The peak of each chunk, the best of these, and then its place in its chunk. The best of the row,
// M, has the probability 1 / sum(exp(x - M)).
bool draft_output::build_best(ggml_context * c, ggml_backend_t backend, ggml_tensor * logits) {
    const int64_t size = chunk_of(n_vocab_);
    const int64_t n = n_vocab_ / size;
    const int step = static_cast<int>(size);
    ggml_tensor * peaks = ggml_pool_2d(c, logits, GGML_OP_POOL_MAX, step, 1, step, 1, 0, 0);
    ggml_tensor * chunks = ggml_argmax(c, peaks);
    ggml_tensor * columns = ggml_reshape_2d(c, chunks, 1, n_rows_);
    ggml_tensor * chunk = ggml_get_rows(c, ggml_reshape_3d(c, logits, size, n, n_rows_), columns);
    ggml_tensor * places = ggml_argmax(c, ggml_reshape_2d(c, chunk, size, n_rows_));
    ggml_tensor * peak = ggml_get_rows(c, ggml_reshape_3d(c, peaks, 1, n, n_rows_), columns);

    ggml_tensor * e = ggml_exp(c, ggml_sub(c, logits, ggml_reshape_2d(c, peak, 1, n_rows_)));
    ggml_tensor * parts = ggml_sum_rows(c, ggml_reshape_2d(c, e, size, n * n_rows_));
    ggml_tensor * sums = ggml_sum_rows(c, ggml_reshape_2d(c, parts, n, n_rows_));
    for (const ggml_tensor * op : {peaks, chunks, chunk, places, peak, e->src[0], e, parts, sums}) {
        if (!ggml_backend_supports_op(backend, op)) {
            return false;
        }
    }
    guard(backend, {logits, peaks});
    chunk_size_ = size;
    chunks_ = chunks;
    places_ = places;
    normaliser_ = sums;
    return true;
}

// On some backends the argmax of what is not a number is -1, and gathering reads what lies before
// the tensor: that must be memory, too.
void draft_output::guard(ggml_backend_t backend, const std::vector<ggml_tensor *> & gathered) {
    ggml_backend_buffer_type_t type = ggml_backend_get_default_buffer_type(backend);
    const size_t step = ggml_backend_buft_get_alignment(type);
    size_t n_bytes = (chunk_of(n_vocab_) * sizeof(float) + step - 1) / step * step;
    std::vector<size_t> offsets;
    for (const ggml_tensor * tensor : gathered) {
        offsets.push_back(n_bytes);
        n_bytes += (ggml_backend_buft_get_alloc_size(type, tensor) + step - 1) / step * step;
    }
    guarded_.reset(ggml_backend_buft_alloc_buffer(type, n_bytes));
    if (!guarded_) {
        throw backend_error("no room for the output of the draft graph on " +
                            std::string(ggml_backend_name(backend)));
    }
    ggml_backend_buffer_clear(guarded_.get(), 0);
    char * base = static_cast<char *>(ggml_backend_buffer_get_base(guarded_.get()));
    for (size_t i = 0; i < gathered.size(); i++) {
        ggml_backend_tensor_alloc(guarded_.get(), gathered[i], base + offsets[i]);
    }
}

// The k best of a row lie in the k chunks with the largest peaks: only these come to the host, and
// only peaks are sorted.
bool draft_output::build_chunks(ggml_context * c, ggml_backend_t backend, ggml_tensor * logits) {
    const int64_t size = chunk_of(n_vocab_);
    const int64_t n = n_vocab_ / size;
    if (n < 2 * top_k_) {
        return false;
    }
    if (!build_best(c, backend, logits)) {
        return false;
    }
    ggml_tensor * peaks = chunks_->src[0];
    ggml_tensor * few = ggml_top_k(c, peaks, top_k_);
    ggml_tensor * rows = ggml_get_rows(c, ggml_reshape_3d(c, logits, size, n, n_rows_), few);
    for (const ggml_tensor * op : {few, rows}) {
        if (!ggml_backend_supports_op(backend, op)) {
            chunks_ = places_ = normaliser_ = nullptr;
            return false;
        }
    }
    few_ = few;
    few_rows_ = rows;
    return true;
}

// Softmax and sort of whole rows.
bool draft_output::build_top_k(ggml_context * c, ggml_backend_t backend, ggml_tensor * logits) {
    ggml_tensor * best = ggml_top_k(c, logits, top_k_);
    ggml_tensor * p_all = ggml_reshape_3d(c, ggml_soft_max(c, logits), 1, n_vocab_, n_rows_);
    ggml_tensor * p_best = ggml_get_rows(c, p_all, best);
    ggml_tensor * log_p = ggml_log(c, p_best);
    for (const ggml_tensor * op : {best, p_best, log_p}) {
        if (!ggml_backend_supports_op(backend, op)) {
            return false;
        }
    }
    ids_ = best;
    logprobs_ = log_p;
    return true;
}

void draft_output::read(ggml_backend_t backend, int32_t * ids, float * logprobs) {
    if (few_ != nullptr) {
        read_chunks(backend, ids, logprobs);
    } else if (chunks_ != nullptr) {
        read_best(backend, ids, logprobs);
    } else if (ids_ != nullptr) {
        read_top_k(backend, ids, logprobs);
    } else {
        read_logits(backend, ids, logprobs);
    }
}

void draft_output::read_best(ggml_backend_t backend, int32_t * ids, float * logprobs) {
    const auto chunks = fetch<int32_t>(backend, chunks_);
    const auto places = fetch<int32_t>(backend, places_);
    const auto normaliser = fetch<float>(backend, normaliser_);
    ggml_backend_synchronize(backend);
    check_numbers(normaliser);
    for (int64_t i = 0; i < n_rows_; i++) {
        ids[i] = static_cast<int32_t>(chunks[i] * chunk_size_ + places[i]);
        logprobs[i] = -std::log(normaliser[i]);
    }
}

void draft_output::read_chunks(ggml_backend_t backend, int32_t * ids, float * logprobs) {
    const auto few = fetch<int32_t>(backend, few_);
    const auto rows = fetch<float>(backend, few_rows_);
    const auto normaliser = fetch<float>(backend, normaliser_);
    ggml_backend_synchronize(backend);
    check_numbers(normaliser);
    check_numbers(rows);
    const auto k = static_cast<size_t>(top_k_);
    const auto size = static_cast<size_t>(chunk_size_);
    std::vector<std::pair<float, int32_t>> found;  // minus the logit, and the id
    for (int64_t i = 0; i < n_rows_; i++) {
        found.clear();
        for (size_t j = 0; j < k; j++) {
            const int32_t first = few[i * k + j] * static_cast<int32_t>(size);
            const float * chunk = rows.data() + (i * k + j) * size;
            for (size_t place = 0; place < size; place++) {
                found.emplace_back(-chunk[place], first + static_cast<int32_t>(place));
            }
        }
        std::partial_sort(found.begin(), found.begin() + top_k_, found.end());
        const float norm = std::log(normaliser[i]) - found[0].first;
        for (size_t j = 0; j < k; j++) {
            ids[i * k + j] = found[j].second;
            logprobs[i * k + j] = -found[j].first - norm;
        }
    }
}

void draft_output::read_top_k(ggml_backend_t backend, int32_t * ids, float * logprobs) {
    const auto found = fetch<int32_t>(backend, ids_);
    const auto found_logprobs = fetch<float>(backend, logprobs_);
    ggml_backend_synchronize(backend);
    check_numbers(found_logprobs);
    std::copy(found.begin(), found.end(), ids);
    std::copy(found_logprobs.begin(), found_logprobs.end(), logprobs);
    for (int64_t i = 0; i < n_rows_; i++) {
        sort_best_first(ids + i * top_k_, logprobs + i * top_k_, top_k_);
    }
}

void draft_output::read_logits(ggml_backend_t backend, int32_t * ids, float * logprobs) {
    ggml_backend_synchronize(backend);
    std::vector<float> row(n_vocab_);
    for (int64_t i = 0; i < n_rows_; i++) {
        const size_t n = row.size() * sizeof(float);
        ggml_backend_tensor_get(logits_, row.data(), i * n, n);
        check_numbers(row);
        top_k_of(row, top_k_, ids + i * top_k_, logprobs + i * top_k_);
    }
}

}  // namespace dflash
