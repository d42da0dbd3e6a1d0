// Attention of a few rows over a cache.
//
// A block takes a chunk of the cells, one head of keys and values, and up to 64 queries: all heads of all rows that
// read it. Cells come into shared memory 64 at a time. Scores: a warp has 16 cells, and tensor cores multiply their
// keys by eight queries at a time. Sums: a warp has some of the dimensions, and they multiply all cells' values by
// their shares. A second kernel puts the chunks together.
//
// What a query meets, and in which order, depends on its row's cells alone: a masked cell adds nothing to any bit.
#pragma once

namespace few_rows {

constexpr int CELL_WARPS = ATTENTION_THREADS / 32;
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

template <class T, int D>
INLINE void copy_cells(u8 * to, const u8 * from, u64 stride, int first, int last) {
    constexpr int EIGHTS = D / 8;
#pragma unroll 8
    for (int i = thread_index(); i < CELLS * EIGHTS; i += ATTENTION_THREADS) {
        const int cell = i / EIGHTS;
        const bool is_there = first + cell < last;
        T::copy(to + cell * cell_pitch(D), from + (is_there ? (u64) (first + cell) * stride : 0), i % EIGHTS, is_there);
    }
}

template <class K, class V, int D, int TILES> INLINE void attend(const attention & a) {
    constexpr int STEPS = D / 16, OWN = (STEPS + CELL_WARPS - 1) / CELL_WARPS, QUERIES = TILES * TILE_COLUMNS;
    constexpr int PITCH = cell_pitch(D);
    const int warp = thread_index() / 32, lane = thread_index() % 32, g = lane / 4, t = lane % 4;
    const int kv_head = block_y() % a.n_kv_heads, stream = block_y() / a.n_kv_heads;
    const int group = a.n_heads / a.n_kv_heads, first_query = block_z() * QUERIES, n_queries = a.n_rows * group;
    u8 * const keys = shared_memory();
    u8 * const values = keys + CELLS * PITCH;
    u8 * const queries = values + CELLS * PITCH;
    u8 * const shares = queries + QUERIES * D * 2;
    float * const of_warps = (float *) (shares + QUERIES * SHARE_PITCH);

    const int first = chunk_begin(block_x()), end = chunk_begin(block_x() + 1);
    const int last = end < a.n_cells ? end : a.n_cells;
    const u8 * const k = a.k + stream * a.k_stream + kv_head * a.k_head;
    const u8 * const v = a.v + stream * a.v_stream + kv_head * a.v_head;
    let_next_begin();
    wait_for_previous();
    copy_cells<K, D>(keys, k, a.k_cell, first, last);
    copy_commit();
    copy_cells<V, D>(values, v, a.v_cell, first, last);
    copy_commit();

    // Queries in the order of tensor-core fragments, in which lane t has dimensions 4t to 4t + 3 of sixteen.
#pragma unroll 4
    for (int i = thread_index(); i < STEPS * TILES * 32; i += ATTENTION_THREADS) {
        const int query = first_query + i / 32 % TILES * TILE_COLUMNS + i % 32 / 4;
        floats4 x = {0.f, 0.f, 0.f, 0.f};
        if (query < n_queries) {
            const u64 at = stream * a.q_stream + query / group * a.q_row + (kv_head * group + query % group) * a.q_head;
            x = load_input(a.q + at + i / 32 / TILES * 16 + i % 4 * 4);
        }
        *(words2 *) (queries + i * 8) = {halves_of(x.x * a.scale, x.y * a.scale), halves_of(x.z * a.scale, x.w * a.scale)};
    }
    // The mask's rows of this lane's queries: 2t and 2t + 1 of each eight.
    u32 masks[TILES][2];
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        for (int i = 0; i < 2; i++) {
            const int query = first_query + n * TILE_COLUMNS + 2 * t + i;
            masks[n][i] = (query < n_queries ? query : 0) / group * (u32) a.mask_row;
        }
    }

    const u16 * const mask = a.mask + stream * a.mask_stream;

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
                masked[n][i] = at >= last ? 0xfc00 : a.mask ? mask[masks[n][i % 2] + at] : 0;
            }
        }
        copy_wait<1>();
        sync_threads();  // the keys have come for all warps, and at first the queries
        float scores[TILES][4] = {};
        const u8 * const own_keys = keys + (warp * 16 + g) * PITCH + t * 8;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const words2 upper = *(const words2 *) (own_keys + step * 32);
            const words2 lower = *(const words2 *) (own_keys + 8 * PITCH + step * 32);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const words2 q = *(const words2 *) (queries + ((step * TILES + n) * 32 + lane) * 8);
                multiply_tile(scores[n], upper.x, lower.x, upper.y, lower.y, q.x, q.y);
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            for (int i = 0; i < 4; i++) {
                float s = scores[n][i];
                if (a.soft_cap != 0.f) {
                    s = a.soft_cap * tanh_of(s / a.soft_cap);
                }
                scores[n][i] = masked[n][i] == 0xfc00 ? MINUS_INFINITY : s + float_of_half(masked[n][i]);
            }
            for (int i = 0; i < 2; i++) {
                float most = scores[n][i] > scores[n][i + 2] ? scores[n][i] : scores[n][i + 2];
                for (int lanes = 4; lanes < 32; lanes *= 2) {
                    const float other = shuffle_xor(most, lanes);
                    most = other > most ? other : most;
                }
                if (g == 0) {
                    of_warps[warp * QUERIES + n * TILE_COLUMNS + 2 * t + i] = most;
                }
            }
        }
        sync_threads();  // all have read the keys
        if (next < last) {
            copy_cells<K, D>(keys, k, a.k_cell, next, last);
        }
        copy_commit();
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            for (int i = 0; i < 2; i++) {
                const int query = n * TILE_COLUMNS + 2 * t + i;
                float most = largest[n][i];
                for (int w = 0; w < CELL_WARPS; w++) {
                    const float other = of_warps[w * QUERIES + query];
                    most = other > most ? other : most;
                }
                const float factor = largest[n][i] == most ? 1.f : exp_of(largest[n][i] - most);
                largest[n][i] = most;
                totals[n][i] *= factor;
                for (int m = 0; m < OWN; m++) {
                    sums[m][n][i] *= factor;
                    sums[m][n][i + 2] *= factor;
                }
                // Of sixteen cells a word has t and t + 4, or t + 8 and t + 12.
                u16 * share = (u16 *) (shares + query * SHARE_PITCH) + warp * 16 + g % 4 * 2 + g / 4;
                for (int j = 0; j < 2; j++) {
                    const float s = scores[n][i + 2 * j];
                    const float p = s == MINUS_INFINITY ? 0.f : exp_of(s - most);
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
                const u8 * share = shares + (n * TILE_COLUMNS + g) * SHARE_PITCH + step * 32 + t * 4;
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
            copy_cells<V, D>(values, v, a.v_cell, next, last);
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
                of_warps[warp * QUERIES + n * TILE_COLUMNS + 2 * t + i] = total;
            }
        }
    }
    sync_threads();
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        for (int i = 0; i < 2; i++) {
            const int in_block = n * TILE_COLUMNS + 2 * t + i, query = first_query + in_block;
            if (query >= n_queries) {
                continue;
            }
            const u64 column = stream * a.n_rows + query / group, head = kv_head * group + query % group;
            const u64 at = (column * a.n_heads + head) * a.n_chunks + block_x();
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

// The chunks of 256 elements of a column, by a warp.
DEVICE void combine(const attention & a) {
    let_next_begin();
    wait_for_previous();
    const int warp = block_x() * (BLOCK_THREADS / 32) + thread_index() / 32, lane = thread_index() % 32;
    const int n_columns = a.n_streams * a.n_rows, columns = a.converted ? a.n_tiles * TILE_COLUMNS : n_columns;
    const int unit = warp / columns, column = warp % columns, k = a.n_heads * a.head_dim, at = unit * UNIT + lane * 8;
    if (unit * UNIT >= k) {
        return;
    }
    float x[8] = {};
    if (column < n_columns && at < k) {
        const int head = at / a.head_dim;
        const u64 first = ((u64) column * a.n_heads + head) * a.n_chunks;
        const floats2 * totals = (const floats2 *) a.totals + first;
        const float * sums = a.sums + first * a.head_dim + at % a.head_dim;
        float largest = a.sinks ? a.sinks[head] : MINUS_INFINITY, total = a.sinks ? 1.f : 0.f;
#pragma unroll 4
        for (int chunk = 0; chunk < a.n_chunks; chunk++) {
            const floats2 of = totals[chunk];
            const floats4 low = load_input(sums + (u64) chunk * a.head_dim);
            const floats4 high = load_input(sums + (u64) chunk * a.head_dim + 4);
            const float y[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            const float most = of.x > largest ? of.x : largest;
            const float old = largest == most ? 1.f : exp_of(largest - most);
            const float added = of.x == MINUS_INFINITY ? 0.f : exp_of(of.x - most);
            largest = most;
            total = multiply_add(of.y, added, total * old);
            for (int i = 0; i < 8; i++) {
                x[i] = multiply_add(y[i], added, x[i] * old);
            }
        }
        const float scale = total == 0.f ? 0.f : 1.f / total;
        for (int i = 0; i < 8; i++) {
            x[i] *= scale;
        }
        float * out = a.out + (u64) column * k + at;
        store_output(out, {x[0], x[1], x[2], x[3]});
        store_output(out + 4, {x[4], x[5], x[6], x[7]});
    }
    if (a.converted) {
        u8 * tile = a.converted + ((u64) unit * a.n_tiles + column / TILE_COLUMNS) * TILE_BYTES;
        convert_unit(x, tile, column % TILE_COLUMNS, lane);
    }
}

}  // namespace few_rows

KERNEL(combine_chunks, few_rows::attention, few_rows::BLOCK_THREADS, 4) { few_rows::combine(arguments); }

#define FEW_ROWS_ATTENTION(K, V, D, TILES) \
    KERNEL(attention_##K##_##V##_##D##_##TILES, few_rows::attention, few_rows::ATTENTION_THREADS, 1) { \
        few_rows::attend<few_rows::K##_cells, few_rows::V##_cells, D, TILES>(arguments); \
    }
