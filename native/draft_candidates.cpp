#include "draft_candidates.h"

#include <numeric>
#include <string>
#include <vector>

#include "backend.h"
#include "chunks.h"
#include "errors.h"

namespace dflash {

void draft_candidates::build(ggml_context * c, ggml_backend_t backend, draft_scratch & scratch,
                             ggml_tensor * rows, int k, bool in_chunks) {
    if (in_chunks && build_in_chunks(c, backend, scratch, rows, k)) {
        return;
    }
    const int64_t n_vocab = rows->ne[0];
    const int64_t n_rows = rows->ne[1];
    const int64_t size = chunk_of(n_vocab);
    ids = ggml_top_k(c, rows, k);
    logits = ggml_get_rows(c, ggml_reshape_3d(c, rows, 1, n_vocab, n_rows), ids);
    ggml_tensor * peaks = peaks_of(c, backend, rows, size);
    ggml_tensor * sorted = ggml_argsort(c, peaks, GGML_SORT_ORDER_DESC);
    ggml_tensor * columns = ggml_view_2d(c, sorted, 1, n_rows, sorted->nb[1], 0);
    const auto exps = sum_exps(c, backend, rows, peaks, columns);
    if (!exps || !supports(backend, {ids, logits, peaks, sorted})) {
        throw backend_error(std::string(ggml_backend_name(backend)) +
                            " cannot search the drafter's output; load without a drafter");
    }
    logits = ggml_reshape_2d(c, logits, k, n_rows);
    sums = exps->sums;
}

bool draft_candidates::build_in_chunks(ggml_context * c, ggml_backend_t backend,
                                       draft_scratch & scratch, ggml_tensor * rows, int k) {
    const auto chunks = find_chunks(c, backend, rows, k);
    const auto best = chunks ? find_best(c, backend, *chunks) : std::nullopt;
    if (!best) {
        return false;
    }
    const int64_t n_rows = rows->ne[1];
    const int64_t size = chunks->size;
    create_table(backend, size, rows->ne[0] / size);
    // Of values that are not numbers backends may make any place, but each must be of a token.
    ggml_tensor * few = ggml_get_rows(c, table_, ggml_reshape_1d(c, chunks->few, k * n_rows));
    ggml_tensor * found =
        ggml_get_rows(c, ggml_reshape_3d(c, few, 1, size * k, n_rows), best->places);
    found = ggml_clamp(c, found, 0.0f, static_cast<float>(rows->ne[0] - 1));
    ggml_tensor * whole = ggml_cast(c, ggml_reshape_2d(c, found, k, n_rows), GGML_TYPE_I32);
    if (!supports(backend, {few, found, whole})) {
        return false;
    }
    scratch.place_guarded(size, {rows, chunks->peaks});
    ids = whole;
    logits = ggml_reshape_2d(c, best->values, k, n_rows);
    sums = chunks->exps.sums;
    return true;
}

void draft_candidates::create_table(ggml_backend_t backend, int64_t size, int64_t n_chunks) {
    // Room before and after it, for chunks that are not there.
    const int64_t n_rows = 2 * n_chunks + 2;
    constants_ = new_tensors(2);
    ggml_tensor * all = ggml_new_tensor_2d(constants_.get(), GGML_TYPE_F32, size, n_rows);
    table_ = ggml_view_2d(constants_.get(), all, size, n_chunks, all->nb[1], all->nb[1]);
    buffer_.reset(ggml_backend_alloc_ctx_tensors(constants_.get(), backend));
    if (!buffer_) {
        refuse_room(backend, "the output of the draft graph");
    }
    std::vector<float> values(size * n_rows, 0.0f);
    std::iota(values.begin() + size, values.begin() + size + size * n_chunks, 0.0f);
    ggml_backend_tensor_set(all, values.data(), 0, values.size() * sizeof(float));
}

}  // namespace dflash
