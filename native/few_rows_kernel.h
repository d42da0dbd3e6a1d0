#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "ggml.h"

namespace dflash {

// What kernels call matrices of this type with rows of k elements, as in native/cuda/product.cuh;
// empty: there are none for them.
std::string few_rows_operand(ggml_type type, int64_t k);

// One of the kernels that multiply: its two block types, whether all their units lie at multiples
// of 16 bytes, and the tiles of eight columns of a block.
struct few_rows_kernel {
    struct operand {
        ggml_type type;
        bool aligned;
        bool operator==(const operand & o) const { return type == o.type && aligned == o.aligned; }
        bool operator<(const operand & o) const {
            return type != o.type ? type < o.type : aligned > o.aligned;
        }
    };
    operand a, b;  // a <= b
    int tiles;
    bool of_experts = false;  // then of one type, and one tile

    std::string name() const;
    int shared_bytes() const;
};

// One of the kernels of attention: the types of keys and values, the length of a head, and the
// groups of sixteen queries of a block; `heads` of them share keys and values.
struct few_rows_attention_kernel {
    ggml_type keys, values;
    int head_dim;
    int groups;
    int heads;

    std::string name() const;
    int shared_bytes() const;
};

// What kernels of attention are called for a cache of these types and heads of this length, as in
// native/cuda/attention.cuh, with the groups left off; empty: there are none.
std::string few_rows_attention(ggml_type keys, ggml_type values, int head_dim);

// What a plan may do.
struct few_rows_rules {
    // Whether the kernels can read a tensor's memory.
    std::function<bool(const ggml_tensor &)> reads;
    std::function<bool(const few_rows_kernel &)> has;
    // Whether ours is the faster for matrices of this type, this length of a row and so many rows,
    // in passes of `n_rows`.
    std::function<bool(ggml_type, int64_t k, int64_t rows, int64_t n_rows)> is_faster;
    // Whether there is this kernel of attention, and it is not left to ggml.
    std::function<bool(const few_rows_attention_kernel &)> attends;
    // For experts' matrices, and passes of `n_rows`.
    std::function<bool(ggml_type, int64_t k, int64_t rows, int64_t n_rows)> takes_experts;
    int n_processors = 0;
};

// Whether a plan by these rules takes products of this matrix with so many columns.
bool takes_matrix(const ggml_tensor & weight, int64_t n_columns, const few_rows_rules & rules);

// The block type and the alignment of a matrix for which there are kernels.
few_rows_kernel::operand operand_of(const ggml_tensor & weight);

bool is_aligned(const void * at, size_t stride, size_t to);
bool is_matrix(const ggml_tensor & t);

// Whether there are kernels for a matrix, where it lies.
bool is_readable(const ggml_tensor & weight, const few_rows_rules & rules);

// The same for the matrices of experts, one behind the other.
bool are_readable_experts(const ggml_tensor & weights, const few_rows_rules & rules);

// How many units of a row a block adds up: by the shapes and the GPU alone, never by the columns.
int few_rows_units_per_part(int row_blocks, int units, int n_processors);

}  // namespace dflash
