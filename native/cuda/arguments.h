// What a launch of the kernels for few rows is given. Read by the host's compiler and by NVRTC, so
// it includes nothing, and has no type that the two would lay out differently.
#pragma once

namespace few_rows {

constexpr int UNIT =
    256;  // elements of a row that are read at a time, padded with zeros at the row's end
constexpr int TILE_COLUMNS = 8;  // columns of one tensor-core instruction
constexpr int BLOCK_ROWS = 128;  // rows of the matrix for one block, 16 for a warp
constexpr int BLOCK_THREADS = BLOCK_ROWS * 2;
constexpr int MAX_MATRICES = 3;
constexpr int MAX_COLUMNS = 64;
// Bytes of the converted input for one unit of eight columns: 256 x 8 halves, the sums of 16
// elements as two halves each, and one scale for each column.
constexpr int TILE_BYTES = UNIT * TILE_COLUMNS * 2 + 16 * TILE_COLUMNS * 4 + TILE_COLUMNS * 4;

enum activation { NONE = 0, SWIGLU = 1, GEGLU = 2, SWIGLU_OAI = 3 };

// One weight matrix [rows, k] in GGUF blocks, and where its product goes.
struct matrix {
    const unsigned char * weights;
    unsigned long long row_bytes;
    float * out;                    // [n_columns, out_stride], f32
    unsigned long long out_stride;  // floats from one column to the next
    const float * bias;             // [rows], or null: added before the activation
    const float * gate;  // [n_columns], or null: the result is multiplied by the gate's sigmoid
    const float * residuals[2];  // [n_columns, residual_stride], or null: added to that, in this
                                 // order; may be `out`
    unsigned long long residual_strides[2];
    int rows;
    int type;  // 0 or 1: which of the kernel's two block types
};

// The products of up to three matrices with one input. With an activation, matrix 0 is the gate and
// matrix 1 the values (`up`), of equally many rows; out of matrix 0 receives activation(gate) * up.
struct product {
    matrix matrices[MAX_MATRICES];
    const unsigned char * x;  // the converted input: [units][tiles][TILE_BYTES]
    float * partials;         // scratch for sums of parts: see product_scratch()
    unsigned * counters;  // one for each block of rows, all zero, and zero again after the launch
    int n_matrices;
    int k;               // elements of a row of the matrices, a multiple of 32
    int units_per_part;  // a block sums this many units; the last block of a row adds the parts in
                         // order
    int n_columns;       // 1 to MAX_COLUMNS
    int activation;
    float alpha, limit;  // of SWIGLU_OAI
};

// Up to eight pairs of a row and one of its experts, of the same expert: what one block takes.
struct expert_item {
    int expert;
    int n;                    // of pairs; the places behind them have one of these again
    int pairs[TILE_COLUMNS];  // row * n_used + which of the row's experts
};

// What rows chose of some experts, put in order.
struct choice {
    const int * ids;             // [n_rows, n_used]
    unsigned long long ids_row;  // ints from one row to the next
    expert_item * items;         // [most_items()]; those that are not needed have no pairs
    int n_rows, n_used, n_experts;
};
constexpr int MAX_EXPERTS = 1024;
constexpr int MAX_PAIRS = 1024;
constexpr int CHOICE_SHARED = (2 * MAX_EXPERTS + MAX_PAIRS) * 4;  // bytes
constexpr int most_items(int n_pairs, int n_experts) {
    return n_pairs / TILE_COLUMNS + (n_pairs < n_experts ? n_pairs : n_experts);
}

// A product with the experts that rows chose. Of `base`, which has one matrix, or gate and up of an
// activation, `out` is that of the first row's first expert, out_stride leads to its next expert,
// bias is the first expert's, and x is the converted input.
struct expert_product {
    product base;
    const expert_item * items;
    unsigned long long expert_bytes;  // from one expert's matrix to the next
    unsigned long long expert_bias;   // floats from one expert's bias to the next
    unsigned long long out_row;       // floats from one row's results to the next
    int n_used;
    int n_inputs;  // of a row: one for all its experts, or n_used
    int n_tiles;   // of the input
};

constexpr int PLAIN_WARPS = 4;                                       // for a row of an F32 matrix
constexpr int PLAIN_ROWS = BLOCK_THREADS / 32 / PLAIN_WARPS;         // of a block
constexpr int PLAIN_SHARED = BLOCK_THREADS / 32 * TILE_COLUMNS * 4;  // bytes

// Products of one or two F32 matrices, such as routers, with one input as it is.
struct plain_matrix {
    const float * weights;
    unsigned long long row;  // floats from one row of the matrix to the next
    float * out;
    unsigned long long out_stride;
    int rows;
};
struct plain_product {
    plain_matrix matrices[2];  // the second of no rows, if there is none
    const float * x;
    unsigned long long x_stride;
    int k;  // a multiple of 4
    int n_columns;
};

// The input of products: f32 [n_columns, stride] -> halves in the order in which tensor cores take
// them.
struct conversion {
    const float * x;
    unsigned long long stride;  // floats from one column to the next
    unsigned char * out;        // [units][tiles][TILE_BYTES]; columns beyond n_columns are zero
    int k;
    int n_columns;
    int n_tiles;
};

// What rows chose, and the input of the experts' product, in one launch.
struct chosen_input {
    choice chosen;
    conversion input;
};

// Before that, the input is made of x: x / sqrt(mean(x^2) + epsilon) * weight, which goes to
// `normal`, too.
struct normalization {
    conversion input;
    const float * weight;  // [k]
    float * normal;        // [n_columns, normal_stride]; may be x
    unsigned long long normal_stride;
    float epsilon;
};

// Attention over the cells of a cache is computed in chunks of these, and the chunks' results are
// put together in their order. Where a chunk begins depends on nothing but its number and the
// model, so a row has the same bits whatever comes beside it, and however many cells follow. The
// first are of 64 cells; from each power of two on, as many more are twice as long. That is enough
// blocks for a large GPU, and few enough results to put together.
constexpr int LONG_HEAD = 128;
constexpr int chunk_begin(int chunk, int n_kv_heads, int head_dim) {
    const int heads = head_dim > LONG_HEAD ? 2 * n_kv_heads : n_kv_heads;
    const int n = heads > 8 ? 16 : 128 / heads;
    return chunk < n ? chunk * 64 : (n + chunk % n) * 64 << (chunk / n - 1);
}

// Attention of rows over a cache: softmax(mask + scale * q k) v for each head, in grouped queries.
// A column is a row of the result, [n_streams * n_rows, n_heads * head_dim] f32.
struct attention {
    const float * q;  // [head_dim] each; strides in floats
    unsigned long long q_row, q_head, q_stream;
    const unsigned char * k;  // strides in bytes
    unsigned long long k_cell, k_head, k_stream;
    const unsigned char * v;
    unsigned long long v_cell, v_head, v_stream;
    const unsigned short * mask;               // halves [n_rows, n_cells], added to scores
    unsigned long long mask_row, mask_stream;  // halves
    const float * sinks;                       // [n_heads]: a score each without a value; or null
    unsigned short * means;  // halves [columns][n_heads][n_chunks][head_dim]: of a chunk's values
    float * totals;  // [columns][n_heads][n_chunks]: the largest score, and the sum of exp(score -
                     // largest); scores times log2(e), powers of two in place of exp
    float * out;
    unsigned char * converted;  // null, or where the result goes as the input of a product, too
    int n_tiles;                // of that
    int head_dim, n_heads, n_kv_heads;
    unsigned long long
        group_inverse;  // to divide by the heads of a group: 2^32 / group, rounded up
    int n_rows, n_streams, n_cells, n_chunks;
    float scale, soft_cap;  // soft_cap * tanh(score / soft_cap), unless it is 0
};

constexpr int COMBINE_SHARED = BLOCK_THREADS * 10 * 4;  // bytes

// A chunk's cells are shared out to streams, tile by tile, each of which has warps of its own and
// is summed by itself.
constexpr int STREAMS = 2;
constexpr int tile_cells(int head_dim) { return head_dim > LONG_HEAD ? 16 : 32; }
constexpr int GROUP_QUERIES = 16;  // of the rows of one tensor-core instruction
// Groups of queries of a warp, for which it reads a tile once. The sums of two fill its registers.
constexpr int warp_groups(int head_dim, int groups) {
    return groups == 4 && head_dim <= LONG_HEAD ? 2 : 1;
}
constexpr int attention_threads(int head_dim, int groups) {
    return 32 * STREAMS * groups / warp_groups(head_dim, groups);
}
// So the queries themselves then lie in shared memory, those of short heads aside.
constexpr bool shares_queries(int head_dim, int groups) {
    return warp_groups(head_dim, groups) == 2 && head_dim > 64;
}
// Rows that the queries of a block may belong to, where `group` heads share keys and values.
constexpr int attention_rows(int groups, int group) {
    const int n = groups * GROUP_QUERIES;
    return n % group == 0 ? n / group : (n + group - 2) / group + 1;
}
// Bytes of a cell's keys or values in shared memory, and of a row's mask: lanes that read eight of
// them fall on different banks.
constexpr int cell_pitch(int head_dim) { return head_dim * 2 + 16; }
constexpr int mask_pitch(int head_dim) { return STREAMS * tile_cells(head_dim) * 2 + 16; }
// The same as they come from the cache: halves as they stay, blocks of q8_0 from up to 14 bytes
// behind a multiple of 16 on.
constexpr int raw_pitch(int head_dim, bool are_blocks) {
    return are_blocks ? (head_dim / 32 * 34 + 30) / 16 * 16 : cell_pitch(head_dim);
}
// A tile of each stream, as it comes, and its masks. A block has room for two: while one is
// multiplied, the next one comes.
constexpr int ATTENTION_STAGES = 2;
constexpr int attention_stage(int head_dim, int groups, int group, bool key_blocks,
                              bool value_blocks) {
    return STREAMS * tile_cells(head_dim) *
               (raw_pitch(head_dim, key_blocks) + raw_pitch(head_dim, value_blocks)) +
           attention_rows(groups, group) * mask_pitch(head_dim);
}
// What a stream gives to the other one at the end, of a group: half of its sums, the largest scores
// and the totals.
constexpr int given_bytes(int head_dim) { return ((head_dim / 16 + 1) / 2 * 2 + 1) * 32 * 16; }
constexpr int attention_shared_memory(int head_dim, int groups, int group, bool key_blocks,
                                      bool value_blocks) {
    const int tiles =
        ATTENTION_STAGES * attention_stage(head_dim, groups, group, key_blocks, value_blocks) +
        STREAMS * tile_cells(head_dim) * cell_pitch(head_dim) * (key_blocks + value_blocks) +
        (shares_queries(head_dim, groups) ? groups * GROUP_QUERIES * head_dim * 2 : 0);
    const int given = groups * STREAMS * given_bytes(head_dim);
    return tiles > given ? tiles : given;
}

// Shared memory of a product: a ring of weights for each warp, and one of converted inputs for the
// block.
constexpr int INPUT_STAGES = 2;

// Bytes from one row to the next in the ring of weights. 32 (mod 64) lets the lanes of a load of 8
// bytes fall on different banks. A unit whose start may lie off 16 bytes takes up to 14 bytes more,
// and is loaded by 4 bytes, for which 16 (mod 32) is best, also where every second row lies 8 bytes
// off the others.
constexpr int row_pitch(int unit_bytes, bool aligned) {
    const int bytes = unit_bytes + (aligned ? 0 : 14), narrow = (bytes + 15) / 32 * 32 + 16;
    return aligned || (bytes <= 160 && narrow > 160) ? (bytes + 31) / 64 * 64 + 32 : narrow;
}
// Units of that ring. Three of the wide ones would leave a multiprocessor one block, or none on
// desktop GPUs.
constexpr int weight_stages(int pitch) { return pitch <= 160 ? 3 : 2; }
constexpr int weight_bytes(int pitch) { return weight_stages(pitch) * BLOCK_ROWS * pitch; }
// With `tiles` columns of eight: bytes for block types whose rings take `weights` and
// `other_weights` bytes. Inputs of one tile are read without it, but for floats.
constexpr int product_shared_memory(int weights, int other_weights, int tiles) {
    return (weights > other_weights ? weights : other_weights) +
           (tiles == 1 && weights != 0 && other_weights != 0 ? 0
                                                             : INPUT_STAGES * tiles * TILE_BYTES);
}
// f32 of `partials` for one launch.
constexpr unsigned long long product_scratch(int row_blocks, int parts, int tiles) {
    return parts > 1 ? (unsigned long long)row_blocks * parts * BLOCK_ROWS * tiles * TILE_COLUMNS
                     : 0;
}

}  // namespace few_rows
