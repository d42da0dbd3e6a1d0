#pragma once

#include <cstdint>
#include <optional>

#include "ggml-backend.h"

namespace dflash {

// Nodes that search rows of logits, f32 [n_vocab, rows], on any ggml backend. Rows of logits are
// few and long for a GPU, so each row is cut into chunks, which keep all of it busy.

// The size of a chunk; n_vocab itself if it has no suitable divisor.
int64_t chunk_of(int64_t n_vocab);

// The largest of each chunk, f32 [n_vocab / size, rows].
ggml_tensor * peaks_of(ggml_context * c, ggml_backend_t backend, ggml_tensor * logits,
                       int64_t size);

// The same on backends that cannot pool.
ggml_tensor * peaks_by_argmax(ggml_context * c, ggml_tensor * logits, int64_t size);

// Where the largest of each row is, i32 [rows]: in which chunk, and where in it.
struct best_place {
    ggml_tensor * peaks = nullptr;
    ggml_tensor * chunks = nullptr;
    ggml_tensor * chunk = nullptr;  // f32 [chunk, 1, rows]: the logits of that chunk
    ggml_tensor * places = nullptr;
};

best_place find_place(ggml_context * c, ggml_backend_t backend, ggml_tensor * logits, int64_t size);

struct exp_sums {
    ggml_tensor * below = nullptr;  // f32 [n_vocab, rows]: x - M
    ggml_tensor * sums = nullptr;   // f32 [1, rows]: sum(exp(x - M))
};

// M is the peak in this column (i32 [1, rows]) of a row's peaks. None if the backend cannot do it.
// alike: a row's sum has the same bits beside any number of rows, at the cost of one more step.
std::optional<exp_sums> sum_exps(ggml_context * c, ggml_backend_t backend, ggml_tensor * logits,
                                 ggml_tensor * peaks, ggml_tensor * columns, bool alike = false);

// The k best of a row are in the k chunks with the largest peaks, so only these are searched.
struct likely_chunks {
    int64_t size = 0;  // of a chunk
    ggml_tensor * peaks = nullptr;
    ggml_tensor * few = nullptr;   // i32 [k, rows]: the chunks with the largest peaks
    ggml_tensor * rows = nullptr;  // f32 [size, k, rows]: their logits
    exp_sums exps;                 // M is the largest of the row
};

// None if there are too few chunks of any size for it to pay, or if the backend cannot do it.
std::optional<likely_chunks> find_chunks(ggml_context * c, ggml_backend_t backend,
                                         ggml_tensor * logits, int64_t k, bool alike = false);

// sum(exp((x - M) / T)) of each chunk of each row, f32 [1, chunks * rows]; null if the backend
// cannot do it.
ggml_tensor * tempered_sums(ggml_context * c, ggml_backend_t backend, const likely_chunks & chunks,
                            float temperature, bool alike = false);

struct best_of_few {
    ggml_tensor * places = nullptr;  // i32 [k, rows]: among the logits of the few chunks
    ggml_tensor * values = nullptr;  // f32 [1, k, rows]: the largest, in descending order
};

// None if the backend cannot do it.
std::optional<best_of_few> find_best(ggml_context * c, ggml_backend_t backend,
                                     const likely_chunks & chunks);

// The ids of the k best of a row, equal ones in ascending order, from what the host has read of it:
// `few` of its chunks, and `places` and `values` of the best in them.
void read_ids(const int32_t * few, const int32_t * places, const float * values, int64_t size,
              int k, int32_t * ids);

}  // namespace dflash
