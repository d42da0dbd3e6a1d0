#pragma once

#include <cstddef>
#include <cstdint>

// Products of a few rows with 16 outputs of a matrix in MXFP4, on x86 processors.
//
// ggml takes one row and one output at a time, and reads each weight's four bits anew for each row.
// Here weights of 16 outputs are made ready once for all rows, one vector for four inputs. An
// output is the sum of its blocks in order, so it has the same bits beside any number of rows, and
// with either instruction set.
namespace dflash::expert_tile {

constexpr int n_outputs = 16, block_size = 32;
constexpr int most_rows = 32;  // that one reading of a tile serves

// Values of rows, rounded to 8 bits in blocks of 32: value = scale * q.
struct operand {
    int8_t * q;       // [row][block][32]
    float * scale;    // [row][block]
    int32_t * sum;    // [row][block], of the 32 q
    size_t n_blocks;  // of a row

    static size_t bytes(size_t n_blocks_of_all) { return n_blocks_of_all * (block_size + 8); }
    // Lays out so many blocks in memory that is aligned for floats.
    static operand at(void * memory, size_t n_blocks_of_all, size_t n_blocks);
};

struct kernels {
    // Rounds a block of 32 values of a row. `at` counts the blocks of all rows.
    void (*round)(const float * x, const operand & to, size_t at);
    // outs[i][0..15] = the tile's outputs for row rows[i], of at most `most_rows`. A tile is 16
    // rows of a matrix, which follow each other.
    void (*multiply)(const unsigned char * tile, const operand & x, const int32_t * rows, int n,
                     float * const * outs);
    const char * name;
    int rows_a_thread;  // see `expert_products.h`
};

// For this processor; null if it has neither AVX-512 VNNI nor AVX2.
const kernels * for_this_processor();
// By name, for tests; null if this processor does not have it.
const kernels * named(const char * name);

}  // namespace dflash::expert_tile
