// Attention of a few rows over a cache.
//
// A block takes a chunk of the cells, one head of keys and values, and up to 64 queries: all heads of all rows that
// read it. Cells come into shared memory 64 at a time. Scores: each of four warps has 16 cells, and tensor cores multiply
// their keys by eight queries at a time. Sums: a warp has some of the dimensions, and multiplies all cells' values by
// their shares. A second kernel puts the chunks together. Exponentials are powers of two.
//
// What a query meets, and in which order, depends on its row's cells alone: a masked cell adds nothing to any bit.
#pragma once

namespace few_rows {

constexpr int CELL_WARPS = GROUP_THREADS / 32;
constexpr float LOG2_E = 1.4426950408889634f;
#define MINUS_INFINITY float_of_bits(0xff800000)

// How the cells of a cache become halves: eight elements, or zeros.
struct F16_cells {
    INLINE static void copy(u8 * to, const u8 * cell, int eight, bool is_there) {
        copy_async(to + eight * 16, is_there ? cell + eight * 16 : cell, is_there ? 16 : 0);
    }
};
struct Q8_0_cells {
    INLINE static void copy(u8 * to, const u8 * cell, int eight, bool is_there) {
        u32 w[4] = {};
        if (is_there) {
            const u16 * block = (const u16 *) (cell + eight / 4 * 34);
            const u16 * q = block + 1 + eight % 4 * 4;
            const u32 scale = block[0] | block[0] << 16;
            for (int i = 0; i < 4; i++) {
                const u32 two = pick_bytes(q[i] ^ 0x8080u, MAGIC_BYTES, 0x4140);
                w[i] = multiply_halves(add_halves(two, twice(0xe480)), scale);  // less 1024 + 128
            }
        }
        *(words4 *) (to + eight * 16) = {w[0], w[1], w[2], w[3]};
    }
};

template <class T, int D, int THREADS>
INLINE void copy_cells(u8 * to, const u8 * from, u64 stride, int first, int last) {
    constexpr int EIGHTS = D / 8;
#pragma unroll 8
    for (int i = thread_index(); i < CELLS * EIGHTS; i += THREADS) {
        const int cell = i / EIGHTS;
        const bool is_there = first + cell < last;
        T::copy(to + cell * cell_pitch(D), from + (is_there ? (u64) (first + cell) * stride : 0), i % EIGHTS, is_there);
    }
}

// With GROUPS groups of four warps: each group has TILES tiles of eight queries.
template <class K, class V, int D, int TILES, int GROUPS> INLINE void attend(const attention & a) {
    constexpr int STEPS = D / 16, OWN = (STEPS + CELL_WARPS - 1) / CELL_WARPS, THREADS = GROUPS * CELL_WARPS * 32;
    constexpr int QUERIES = GROUPS * TILES * TILE_COLUMNS, PITCH = cell_pitch(D);
    const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
    const int warp = thread_index() / 32 % CELL_WARPS, own_tile = thread_index() / 32 / CELL_WARPS * TILES;
    const int own_query = own_tile * TILE_COLUMNS;  // the group's first in the block
    const int kv_head = block_y() % a.n_kv_heads, stream = block_y() / a.n_kv_heads;
    const int group = a.n_heads / a.n_kv_heads, first_query = block_z() * QUERIES, n_queries = a.n_rows * group;
    u8 * const keys = shared_memory();
    u8 * const values = keys + CELLS * PITCH;
    u8 * const queries = values + CELLS * PITCH;
    u8 * const shares = queries + QUERIES * D * 2;
    float * const of_warps = (float *) (shares + QUERIES * SHARE_PITCH);
    const auto row_of = [&](int query) { return (int) ((u64) query * a.group_inverse >> 32); };

    const int first = chunk_begin(block_x()), end = chunk_begin(block_x() + 1);
    const int last = end < a.n_cells ? end : a.n_cells;
    const u8 * const k = a.k + stream * a.k_stream + kv_head * a.k_head;
    const u8 * const v = a.v + stream * a.v_stream + kv_head * a.v_head;
    let_next_begin();
    wait_for_previous();
    copy_cells<K, D, THREADS>(keys, k, a.k_cell, first, last);
    copy_commit();
    copy_cells<V, D, THREADS>(values, v, a.v_cell, first, last);
    copy_commit();

    // Queries in the order of tensor-core fragments, in which lane t has dimensions 4t to 4t + 3 of sixteen.
    const float * const q = a.q + stream * a.q_stream + kv_head * group * a.q_head;
#pragma unroll 8
    for (int i = thread_index(); i < STEPS * GROUPS * TILES * 32; i += THREADS) {
        const int query = first_query + i / 32 % (GROUPS * TILES) * TILE_COLUMNS + i % 32 / 4, row = row_of(query);
        floats4 x = {0.f, 0.f, 0.f, 0.f};
        if (query < n_queries) {
            const u64 at = row * a.q_row + (query - row * group) * a.q_head;
            x = load_input(q + at + i / 32 / (GROUPS * TILES) * 16 + i % 4 * 4);
        }
        *(words2 *) (queries + i * 8) = {halves_of(x.x * a.scale, x.y * a.scale), halves_of(x.z * a.scale, x.w * a.scale)};
    }
    // The mask's rows of this lane's queries: 2t and 2t + 1 of each eight.
    const u16 * const mask = a.mask + stream * a.mask_stream;
    u32 rows[TILES][2];
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        for (int i = 0; i < 2; i++) {
            const int query = first_query + own_query + n * TILE_COLUMNS + 2 * t + i;
            rows[n][i] = query < n_queries ? row_of(query) : 0;
        }
    }

    float sums[OWN][TILES][4] = {}, largest[TILES][2], totals[TILES][2] = {};
    for (int n = 0; n < TILES; n++) {
        largest[n][0] = largest[n][1] = MINUS_INFINITY;
    }
    for (int cell = first; cell < last; cell += CELLS) {
        const int mine = cell + warp * 16 + g, next = cell + CELLS;
        u32 masked[TILES][4];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            for (int i = 0; i < 4; i++) {
                const int at = mine + i / 2 * 8;
                masked[n][i] = at < last ? mask[rows[n][i % 2] * (u32) a.mask_row + at] : 0xfc00;
            }
        }
        copy_wait<1>();
        sync_threads();  // the keys have come for all warps, and at first the queries
        float scores[TILES][4] = {};
        const u8 * const own_keys = keys + (warp * 16 + g) * PITCH + t * 8;
        const u8 * const own_queries = queries + (own_tile * 32 + lane) * 8;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const words2 upper = *(const words2 *) (own_keys + step * 32);
            const words2 lower = *(const words2 *) (own_keys + 8 * PITCH + step * 32);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const words2 x = *(const words2 *) (own_queries + (step * GROUPS * TILES + n) * 256);
                multiply_tile(scores[n], upper.x, lower.x, upper.y, lower.y, x.x, x.y);
            }
        }
        if (a.soft_cap != 0.f) {
            for (int n = 0; n < TILES; n++) {
                for (int i = 0; i < 4; i++) {
                    scores[n][i] = a.soft_cap * tanh_of(scores[n][i] / a.soft_cap);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            for (int i = 0; i < 4; i++) {
                scores[n][i] = (scores[n][i] + float_of_half(masked[n][i])) * LOG2_E;
            }
            for (int i = 0; i < 2; i++) {
                float most = scores[n][i] > scores[n][i + 2] ? scores[n][i] : scores[n][i + 2];
                for (int lanes = 4; lanes < 32; lanes *= 2) {
                    const float other = shuffle_xor(most, lanes);
                    most = other > most ? other : most;
                }
                if (g == 0) {
                    of_warps[warp * QUERIES + own_query + n * TILE_COLUMNS + 2 * t + i] = most;
                }
            }
        }
        sync_threads();  // all have read the keys
        if (next < last) {
            copy_cells<K, D, THREADS>(keys, k, a.k_cell, next, last);
        }
        copy_commit();
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            for (int i = 0; i < 2; i++) {
                const int query = own_query + n * TILE_COLUMNS + 2 * t + i;
                float most = largest[n][i];
                for (int w = 0; w < CELL_WARPS; w++) {
                    const float other = of_warps[w * QUERIES + query];
                    most = other > most ? other : most;
                }
                const float from = most == MINUS_INFINITY ? 0.f : most, factor = exp2_of(largest[n][i] - from);
                largest[n][i] = most;
                totals[n][i] *= factor;
                for (int m = 0; m < OWN; m++) {
                    sums[m][n][i] *= factor;
                    sums[m][n][i + 2] *= factor;
                }
                // Of sixteen cells a word has t and t + 4, or t + 8 and t + 12.
                u16 * share = (u16 *) (shares + query * SHARE_PITCH) + warp * 16 + g % 4 * 2 + g / 4;
                for (int j = 0; j < 2; j++) {
                    const float p = exp2_of(scores[n][i + 2 * j] - from);
                    totals[n][i] += p;
                    share[j * 8] = (u16) halves_of(p, 0.f);
                }
            }
        }
        copy_wait<1>();
        sync_threads();  // the values have come, and the shares
#pragma unroll
        for (int step = 0; step < CELLS / 16; step++) {
            u32 p[TILES][2];
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const u8 * share = shares + (own_query + n * TILE_COLUMNS + g) * SHARE_PITCH + step * 32 + t * 4;
                p[n][0] = *(const u32 *) share;
                p[n][1] = *(const u32 *) (share + 16);
            }
#pragma unroll
            for (int m = 0; m < OWN; m++) {
                const int of = warp + m * CELL_WARPS;
                if (STEPS % CELL_WARPS == 0 || of < STEPS) {
                    const u8 * at = values + (step * 16 + t) * PITCH + of * 32 + g * 4;
                    u32 w[4];
                    for (int i = 0; i < 4; i++) {
                        w[i] = *(const u32 *) (at + i * 4 * PITCH);
                    }
                    // Rows g and g + 8 of the tile are dimensions 2g and 2g + 1.
                    const u32 a0 = pick_bytes(w[0], w[1], 0x5410), a1 = pick_bytes(w[0], w[1], 0x7632);
                    const u32 a2 = pick_bytes(w[2], w[3], 0x5410), a3 = pick_bytes(w[2], w[3], 0x7632);
#pragma unroll
                    for (int n = 0; n < TILES; n++) {
                        multiply_tile(sums[m][n], a0, a1, a2, a3, p[n][0], p[n][1]);
                    }
                }
            }
        }
        sync_threads();  // all have read the values and the shares
        if (next < last) {
            copy_cells<V, D, THREADS>(values, v, a.v_cell, next, last);
        }
        copy_commit();
    }

    for (int n = 0; n < TILES; n++) {
        for (int i = 0; i < 2; i++) {
            float total = totals[n][i];
            for (int lanes = 4; lanes < 32; lanes *= 2) {
                total += shuffle_xor(total, lanes);
            }
            if (g == 0) {
                of_warps[warp * QUERIES + own_query + n * TILE_COLUMNS + 2 * t + i] = total;
            }
        }
    }
    sync_threads();
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        for (int i = 0; i < 2; i++) {
            const int in_block = own_query + n * TILE_COLUMNS + 2 * t + i, query = first_query + in_block;
            if (query >= n_queries) {
                continue;
            }
            const u32 row = rows[n][i], head = kv_head * group + query - row * group;
            const u64 at = ((u64) (stream * a.n_rows + row) * a.n_heads + head) * a.n_chunks + block_x();
            if (warp == 0 && g == 0) {
                float total = 0.f;
                for (int w = 0; w < CELL_WARPS; w++) {
                    total += of_warps[w * QUERIES + in_block];
                }
                *(floats2 *) (a.totals + at * 2) = {largest[n][i], total};
            }
            for (int m = 0; m < OWN; m++) {
                const int of = warp + m * CELL_WARPS;
                if (of < STEPS) {
                    *(floats2 *) (a.sums + at * D + of * 16 + 2 * g) = {sums[m][n][i], sums[m][n][i + 2]};
                }
            }
        }
    }
}

// Some chunks' sums put together: of eight elements.
struct combined {
    float largest, total, x[8];

    INLINE void add(float of, float sum, const float y[8]) {
        const float most = of > largest ? of : largest, from = most == MINUS_INFINITY ? 0.f : most;
        const float old = exp2_of(largest - from), added = exp2_of(of - from);
        largest = most;
        total = multiply_add(sum, added, total * old);
        for (int i = 0; i < 8; i++) {
            x[i] = multiply_add(y[i], added, x[i] * old);
        }
    }
};

// A block for 256 elements of a column; each of its warps takes every eighth chunk.
DEVICE void combine(const attention & a) {
    constexpr int WARPS = BLOCK_THREADS / 32;
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const int unit = block_x(), column = block_y(), k = a.n_heads * a.head_dim, at = unit * UNIT + lane * 8;
    const bool is_there = column < a.n_streams * a.n_rows && at < k;
    combined own = {MINUS_INFINITY, 0.f, {}};
    let_next_begin();
    wait_for_previous();
    if (is_there) {
        const u64 first = ((u64) column * a.n_heads + at / a.head_dim) * a.n_chunks;
        const floats2 * totals = (const floats2 *) a.totals + first;
        const float * sums = a.sums + first * a.head_dim + at % a.head_dim;
#pragma unroll 4
        for (int chunk = warp; chunk < a.n_chunks; chunk += WARPS) {
            const floats2 of = totals[chunk];
            const floats4 low = load_input(sums + (u64) chunk * a.head_dim);
            const floats4 high = load_input(sums + (u64) chunk * a.head_dim + 4);
            const float y[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            own.add(of.x, of.y, y);
        }
    }
    combined * const of_warps = (combined *) shared_memory();
    of_warps[lane * WARPS + warp] = own;
    sync_threads();
    if (warp > 0) {
        return;
    }
    if (is_there) {
        if (a.sinks) {
            const float none[8] = {};
            own.add(a.sinks[at / a.head_dim] * LOG2_E, 1.f, none);
        }
        for (int w = 1; w < WARPS; w++) {
            const combined & other = of_warps[lane * WARPS + w];
            own.add(other.largest, other.total, other.x);
        }
        const float scale = own.total == 0.f ? 0.f : 1.f / own.total;
        for (int i = 0; i < 8; i++) {
            own.x[i] *= scale;
        }
        float * out = a.out + (u64) column * k + at;
        store_output(out, {own.x[0], own.x[1], own.x[2], own.x[3]});
        store_output(out + 4, {own.x[4], own.x[5], own.x[6], own.x[7]});
    }
    if (a.converted) {
        u8 * tile = a.converted + ((u64) unit * a.n_tiles + column / TILE_COLUMNS) * TILE_BYTES;
        convert_unit(own.x, tile, column % TILE_COLUMNS, lane);
    }
}

}  // namespace few_rows

KERNEL(combine_chunks, few_rows::attention, few_rows::BLOCK_THREADS, 4) { few_rows::combine(arguments); }

#define FEW_ROWS_ATTENTION_OF(K, V, D, TILES, GROUPS) \
    KERNEL(attention_##K##_##V##_##D##_##TILES, few_rows::attention, GROUPS * few_rows::GROUP_THREADS, 1) { \
        few_rows::attend<few_rows::K##_cells, few_rows::V##_cells, D, TILES / GROUPS, GROUPS>(arguments); \
    }
// The kernels for blocks of 8, 16, 32 and 64 queries.
#define FEW_ROWS_ATTENTION(K, V, D) \
    FEW_ROWS_ATTENTION_OF(K, V, D, 1, 1) \
    FEW_ROWS_ATTENTION_OF(K, V, D, 2, 2) \
    FEW_ROWS_ATTENTION_OF(K, V, D, 4, 2) \
    FEW_ROWS_ATTENTION_OF(K, V, D, 8, 4)
