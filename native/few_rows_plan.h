#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cuda/arguments.h"
#include "ggml_private.h"

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

    std::string name() const;
    int shared_bytes() const;
};

// What a plan may do.
struct few_rows_rules {
    // Whether the kernels can read a tensor's memory.
    std::function<bool(const ggml_tensor &)> reads;
    std::function<bool(const few_rows_kernel &)> has;
    // Whether ours is the faster for matrices of this type, this length of a row and so many rows.
    // A column must have the same bits whatever comes beside it, so it is for all numbers of
    // columns.
    std::function<bool(ggml_type, int64_t k, int64_t rows)> is_faster;
    int n_processors = 0;
};

// The graph again, as runs of nodes for ggml and launches of ours. The pointers to scratch memory
// in the launches are null.
struct few_rows_plan {
    struct segment {
        int begin, end;  // of `rest`
    };
    struct launch {
        bool converts = false;    // the input, before
        bool normalizes = false;  // and what that is made of, before
        few_rows::normalization input{};
        few_rows::product product{};
        few_rows_kernel kernel{};
        int row_blocks = 0, parts = 0, layers = 0;  // the grid
        std::vector<const ggml_tensor *> nodes;     // whose work it does
    };
    struct step {
        bool is_launch;
        int index;  // of a segment or a launch
    };

    std::vector<ggml_tensor *> rest;
    std::vector<segment> segments;
    std::vector<launch> launches;
    std::vector<step> steps;
    size_t converted_bytes = 0, partial_floats = 0, n_counters = 0;
};

// Whether a plan by these rules takes products of this matrix.
bool takes_matrix(const ggml_tensor & weight, const few_rows_rules & rules);

// A pure function of the graph: nothing is launched, and no memory that a tensor points to is read.
few_rows_plan plan_few_rows(const ggml_private::graph & graph, const few_rows_rules & rules);

// Moves products that may share a launch next to each other, before ggml gives tensors their
// memory: else it often gives one the place of another. True if any was moved.
bool order_few_rows(const ggml_private::graph & graph, const few_rows_rules & rules);

// How many units of a row a block adds up: by the shapes and the GPU alone, never by the columns.
int few_rows_units_per_part(int row_blocks, int units, int n_processors);

}  // namespace dflash
