#include "chunks.h"

#include <algorithm>

#include "backend.h"

namespace dflash {

namespace {

constexpr int64_t wanted_size = 128;
constexpr int64_t least_size = 32;
// So many rows keep a GPU busy without being cut: on an H200 their sums are then done in half of
// the time.
constexpr int64_t many_rows = 64;

// The largest size that divides a row into so many chunks or more; 0 if there is none.
int64_t size_of(int64_t n_vocab, int64_t n_chunks) {
    for (int64_t size = wanted_size; size >= least_size; size /= 2) {
        if (n_vocab % size == 0 && n_vocab / size >= n_chunks) {
            return size;
        }
    }
    return 0;
}

// The sums of each n numbers, f32 [1, all / n]. CUDA adds up long rows by another kernel where
// there are more of them. Of up to 32 numbers both make the same bits.
ggml_tensor * sums_of(ggml_context * c, ggml_tensor * x, int64_t n, bool alike) {
    constexpr int64_t warp = 32;
    if (alike && n > warp && n % warp == 0) {
        x = ggml_sum_rows(c, ggml_reshape_2d(c, x, warp, ggml_nelements(x) / warp));
        n /= warp;
    }
    return ggml_sum_rows(c, ggml_reshape_2d(c, x, n, ggml_nelements(x) / n));
}

}  // namespace

int64_t chunk_of(int64_t n_vocab) {
    const int64_t size = size_of(n_vocab, 1);
    return size > 0 ? size : n_vocab;
}

// In two steps: a kernel of CUDA has one thread for each peak, so few peaks keep little of a GPU
// busy. On an H200, 15 rows of 152k logits take 7 microseconds, and in one step 19.
ggml_tensor * peaks_of(ggml_context * c, ggml_backend_t backend, ggml_tensor * logits,
                       int64_t size) {
    constexpr int first_step = 8;
    ggml_tensor * all = logits;
    const auto pool = [&](ggml_tensor * x, int64_t n) {
        const int step = static_cast<int>(n);
        return ggml_pool_2d(c, x, GGML_OP_POOL_MAX, step, 1, step, 1, 0, 0);
    };
    int64_t rest = size;
    if (size > first_step && size % first_step == 0) {
        logits = pool(logits, first_step);
        rest /= first_step;
    }
    ggml_tensor * peaks = pool(logits, rest);
    return supports(backend, {peaks}) ? peaks : peaks_by_argmax(c, all, size);
}

ggml_tensor * peaks_by_argmax(ggml_context * c, ggml_tensor * logits, int64_t size) {
    const int64_t n = logits->ne[0] / size;
    const int64_t n_chunks = n * logits->ne[1];
    ggml_tensor * places = ggml_argmax(c, ggml_reshape_2d(c, logits, size, n_chunks));
    ggml_tensor * peaks = ggml_get_rows(c, ggml_reshape_3d(c, logits, 1, size, n_chunks),
                                        ggml_reshape_2d(c, places, 1, n_chunks));
    return ggml_reshape_2d(c, peaks, n, logits->ne[1]);
}

best_place find_place(ggml_context * c, ggml_backend_t backend, ggml_tensor * logits,
                      int64_t size) {
    const int64_t n_rows = logits->ne[1];
    ggml_tensor * peaks = peaks_of(c, backend, logits, size);
    ggml_tensor * chunks = ggml_argmax(c, peaks);
    ggml_tensor * chunk = ggml_get_rows(c, ggml_reshape_3d(c, logits, size, peaks->ne[0], n_rows),
                                        ggml_reshape_2d(c, chunks, 1, n_rows));
    return {peaks, chunks, chunk, ggml_argmax(c, ggml_reshape_2d(c, chunk, size, n_rows))};
}

std::optional<exp_sums> sum_exps(ggml_context * c, ggml_backend_t backend, ggml_tensor * logits,
                                 ggml_tensor * peaks, ggml_tensor * columns, bool alike) {
    const int64_t n = peaks->ne[0];
    const int64_t n_vocab = logits->ne[0];
    const int64_t n_rows = logits->ne[1];
    ggml_tensor * peak = ggml_get_rows(c, ggml_reshape_3d(c, peaks, 1, n, n_rows), columns);
    ggml_tensor * below = ggml_sub(c, logits, ggml_reshape_2d(c, peak, 1, n_rows));
    ggml_tensor * e = ggml_exp(c, below);
    ggml_tensor * parts = e;
    if (n_rows < many_rows) {
        parts = ggml_reshape_2d(c, sums_of(c, e, n_vocab / n, alike), n, n_rows);
    }
    ggml_tensor * sums = ggml_sum_rows(c, parts);
    if (!supports(backend, {peak, below, e, parts, sums})) {
        return std::nullopt;
    }
    return exp_sums{below, sums};
}

ggml_tensor * tempered_sums(ggml_context * c, ggml_backend_t backend, const likely_chunks & chunks,
                            float temperature, bool alike) {
    ggml_tensor * scaled = ggml_scale(c, chunks.exps.below, 1.0f / temperature);
    ggml_tensor * e = ggml_exp(c, scaled);
    ggml_tensor * sums = sums_of(c, e, chunks.size, alike);
    return supports(backend, {scaled, e, sums}) ? sums : nullptr;
}

// Not with ggml_top_k: CUDA computes it one row after the other.
std::optional<likely_chunks> find_chunks(ggml_context * c, ggml_backend_t backend,
                                         ggml_tensor * logits, int64_t k, bool alike) {
    const int64_t size = size_of(logits->ne[0], 2 * k);
    if (size == 0) {
        return std::nullopt;
    }
    const int64_t n = logits->ne[0] / size;
    const int64_t n_rows = logits->ne[1];
    ggml_tensor * peaks = peaks_of(c, backend, logits, size);
    ggml_tensor * sorted = ggml_argsort(c, peaks, GGML_SORT_ORDER_DESC);
    ggml_tensor * few = ggml_cont(c, ggml_view_2d(c, sorted, k, n_rows, sorted->nb[1], 0));
    ggml_tensor * rows = ggml_get_rows(c, ggml_reshape_3d(c, logits, size, n, n_rows), few);
    ggml_tensor * columns = ggml_view_2d(c, sorted, 1, n_rows, sorted->nb[1], 0);
    const auto exps = sum_exps(c, backend, logits, peaks, columns, alike);
    if (!exps || !supports(backend, {peaks, sorted, few, rows})) {
        return std::nullopt;
    }
    return likely_chunks{size, peaks, few, rows, *exps};
}

std::optional<best_of_few> find_best(ggml_context * c, ggml_backend_t backend,
                                     const likely_chunks & chunks) {
    const int64_t k = chunks.few->ne[0];
    const int64_t n_rows = chunks.few->ne[1];
    const int64_t n = chunks.size * k;
    ggml_tensor * sorted =
        ggml_argsort(c, ggml_reshape_2d(c, chunks.rows, n, n_rows), GGML_SORT_ORDER_DESC);
    ggml_tensor * places = ggml_cont(c, ggml_view_2d(c, sorted, k, n_rows, sorted->nb[1], 0));
    ggml_tensor * values = ggml_get_rows(c, ggml_reshape_3d(c, chunks.rows, 1, n, n_rows), places);
    if (!supports(backend, {sorted, places, values})) {
        return std::nullopt;
    }
    return best_of_few{places, values};
}

void read_ids(const int32_t * few, const int32_t * places, const float * values, int64_t size,
              int k, int32_t * ids) {
    for (int i = 0; i < k; i++) {
        ids[i] = static_cast<int32_t>(few[places[i] / size] * size + places[i] % size);
    }
    for (int begin = 0, end = 1; begin < k; begin = end++) {
        while (end < k && values[end] == values[begin]) {
            end++;
        }
        std::sort(ids + begin, ids + end);
    }
}

}  // namespace dflash
