// Attention of a few rows over a cache.
//
// A block takes a chunk of the cells, one head of keys and values, and up to 64 queries, which are all heads of all rows
// that read it. Cells come into shared memory 32 at a time, while those before are multiplied: a warp waits for the others
// once for each 32.
// Tensor cores multiply queries by keys; the scores become the queries' shares of the cells, in the same registers, and
// are multiplied by the values. A second kernel puts the chunks together. Exponentials are powers of two.
//
// What a query meets, and in which order, depends on its row's cells alone: a masked cell adds nothing to any bit.
#pragma once

namespace few_rows {

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

template <class T, int D>
INLINE void copy_cells(u8 * to, int pitch, const u8 * from, u64 stride, int first, int last) {
    constexpr int EIGHTS = D / 8;
#pragma unroll 8
    for (int i = thread_index(); i < CELLS * EIGHTS; i += ATTENTION_THREADS) {
        const int cell = i / EIGHTS;
        const bool is_there = first + cell < last;
        T::copy(to + cell * pitch, from + (is_there ? (first + cell) * stride : 0), i % EIGHTS, is_there);
    }
}

// With GROUPS groups of sixteen queries in a block. The warps that share a group have some of the scores and some of the
// dimensions each, and all have its shares. How many they are changes no bit.
template <class K, class V, int D, int GROUPS> INLINE void attend(const attention & a) {
    constexpr int STEPS = D / 16, TILES = CELLS / 8, STAGE = attention_stage(D), STAGES = attention_stages(D, GROUPS);
    constexpr int SPLIT = ATTENTION_THREADS / 32 / GROUPS, OWN = (STEPS + SPLIT - 1) / SPLIT, OWN_TILES = TILES / SPLIT;
    // Fragments of the queries of longer heads lie in shared memory, as their sums take the registers.
    constexpr bool IS_LONG = D > LONG_HEAD;
    const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
    const int warp = thread_index() / 32, own = warp / SPLIT, part = warp % SPLIT;
    const int kv_head = block_y() % a.n_kv_heads, stream = block_y() / a.n_kv_heads;
    const int group = a.n_heads / a.n_kv_heads, n_queries = a.n_rows * group;
    u8 * const stages = shared_memory();
    floats4 * const scored = (floats4 *) (stages + STAGES * STAGE) + own * TILES * 32 + lane;
    words4 * const kept =
        (words4 *) (stages + STAGES * STAGE + attention_scores(GROUPS)) + own * STEPS * 32 + lane;

    const int chunk = grid_x() - 1 - block_x();  // the longest ones first
    const int first = chunk_begin(chunk), end = chunk_begin(chunk + 1);
    const int last = end < a.n_cells ? end : a.n_cells;
    const u8 * const k = a.k + stream * a.k_stream + kv_head * a.k_head;
    const u8 * const v = a.v + stream * a.v_stream + kv_head * a.v_head;
    auto copy = [&](int cell, u8 * to) {
        if (cell < last) {
            copy_cells<K, D>(to, key_pitch(D), k, a.k_cell, cell, last);
            copy_cells<V, D>(to + CELLS * key_pitch(D), value_pitch(D), v, a.v_cell, cell, last);
        }
        copy_commit();
    };
    let_next_begin();
    wait_for_previous();
    for (int i = 0; i < STAGES - 1; i++) {
        copy(first + i * CELLS, stages + i * STAGE);
    }

    // This lane's queries, g and g + 8 of the group's; in each sixteen dimensions it has 4t to 4t + 3.
    int rows[2], heads[2];
    bool is_there[2];
    const u32 * masks[2];
    u32 q[IS_LONG ? 1 : STEPS][4];
    for (int i = 0; i < 2; i++) {
        const int query = (block_z() * GROUPS + own) * GROUP_QUERIES + g + 8 * i;
        is_there[i] = query < n_queries;
        rows[i] = is_there[i] ? (int) (query * a.group_inverse >> 32) : 0;
        heads[i] = kv_head * group + (is_there[i] ? query - rows[i] * group : 0);
        masks[i] = (const u32 *) (a.mask + stream * a.mask_stream + rows[i] * a.mask_row) + t;
    }
    const float * from[2];
    for (int i = 0; i < 2; i++) {
        from[i] = a.q + stream * a.q_stream + rows[i] * a.q_row + heads[i] * a.q_head + 4 * t;
    }
    const float scale = a.soft_cap == 0.f ? a.scale * LOG2_E : a.scale;
#pragma unroll
    for (int step = IS_LONG ? part : 0; step < STEPS; step += IS_LONG ? SPLIT : 1) {
        u32 w[4];
        for (int i = 0; i < 2; i++) {
            const floats4 x = load_input(from[i] + step * 16);
            w[i] = halves_of(x.x * scale, x.y * scale);
            w[i + 2] = halves_of(x.z * scale, x.w * scale);
        }
        if constexpr (IS_LONG) {
            kept[step * 32] = {w[0], w[1], w[2], w[3]};
        } else {
            for (int i = 0; i < 4; i++) {
                q[step][i] = w[i];
            }
        }
    }

    float sums[OWN][2][4] = {}, largest[2] = {MINUS_INFINITY, MINUS_INFINITY}, totals[2] = {};
    int stage = 0;
    for (int cell = first; cell < last; cell += CELLS) {
        u32 masked[OWN_TILES][2];
#pragma unroll
        for (int n = 0; n < OWN_TILES; n++) {
            const int at = cell + (part * OWN_TILES + n) * 8;
            for (int i = 0; i < 2; i++) {
                masked[n][i] = at + 2 * t < last ? masks[i][at / 2] : twice(0xfc00);
            }
        }
        copy_wait<STAGES - 2>();
        sync_threads();  // the cells have come for all warps, and all have left those whose place is filled now
        copy(cell + (STAGES - 1) * CELLS, stages + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE);
        const u8 * const keys = stages + stage * STAGE + (part * OWN_TILES * 8 + g) * key_pitch(D) + t * 8;
        const u8 * const values = stages + stage * STAGE + CELLS * key_pitch(D);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        float scores[TILES][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            words4 w = {};
            if constexpr (IS_LONG) {
                w = kept[step * 32];
            } else {
                w = {q[step][0], q[step][1], q[step][2], q[step][3]};
            }
#pragma unroll
            for (int n = 0; n < OWN_TILES; n++) {
                const words2 of = *(const words2 *) (keys + n * 8 * key_pitch(D) + step * 32);
                multiply_tile(scores[n], w.x, w.y, w.z, w.w, of.x, of.y);
            }
        }
        if (a.soft_cap != 0.f) {
            for (int n = 0; n < OWN_TILES; n++) {
                for (int i = 0; i < 4; i++) {
                    scores[n][i] = a.soft_cap * LOG2_E * tanh_of(scores[n][i] / a.soft_cap);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < OWN_TILES; n++) {
            for (int i = 0; i < 4; i++) {
                const u32 half = i % 2 ? masked[n][i / 2] >> 16 : masked[n][i / 2] & 0xffff;
                scores[n][i] = multiply_add(float_of_half(half), LOG2_E, scores[n][i]);
            }
        }
        if (SPLIT > 1) {
            for (int n = 0; n < OWN_TILES; n++) {
                scored[(part * OWN_TILES + n) * 32] = {scores[n][0], scores[n][1], scores[n][2], scores[n][3]};
            }
            sync_threads();  // the group's scores are there
            for (int n = 0; n < TILES; n++) {
                const floats4 x = scored[n * 32];
                scores[n][0] = x.x, scores[n][1] = x.y, scores[n][2] = x.z, scores[n][3] = x.w;
            }
        }
        float most[2] = {largest[0], largest[1]};
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            for (int i = 0; i < 4; i++) {
                most[i / 2] = scores[n][i] > most[i / 2] ? scores[n][i] : most[i / 2];
            }
        }
        float low[2];
        for (int i = 0; i < 2; i++) {
            for (int lanes = 1; lanes < 4; lanes *= 2) {
                const float other = shuffle_xor(most[i], lanes);
                most[i] = other > most[i] ? other : most[i];
            }
            low[i] = most[i] == MINUS_INFINITY ? 0.f : most[i];
        }
        if (most[0] != largest[0] || most[1] != largest[1]) {
            for (int i = 0; i < 2; i++) {
                const float factor = exp2_of(largest[i] - low[i]);
                largest[i] = most[i];
                totals[i] *= factor;
                for (int step = 0; step < OWN; step++) {
                    for (int j = 0; j < 4; j++) {
                        sums[step][j / 2][2 * i + j % 2] *= factor;
                    }
                }
            }
        }
        u32 shares[TILES][2];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            for (int i = 0; i < 2; i++) {
                const float p0 = exp2_of(scores[n][2 * i] - low[i]), p1 = exp2_of(scores[n][2 * i + 1] - low[i]);
                totals[i] += p0;
                totals[i] += p1;
                shares[n][i] = halves_of(p0, p1);
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n += 2) {
            const u8 * const row = values + (n * 8 + lane % 16) * value_pitch(D) + lane / 16 * 16;
#pragma unroll
            for (int step = 0; step < OWN; step++) {
                const int of = part + step * SPLIT;
                if (STEPS % SPLIT == 0 || of < STEPS) {
                    const u32 p[4] = {shares[n][0], shares[n][1], shares[n + 1][0], shares[n + 1][1]};
                    u32 w[4];
                    load_transposed(w, row + of * 32);
                    multiply_tile(sums[step][0], p[0], p[1], p[2], p[3], w[0], w[1]);
                    multiply_tile(sums[step][1], p[0], p[1], p[2], p[3], w[2], w[3]);
                }
            }
        }
    }

    for (int i = 0; i < 2; i++) {
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            totals[i] += shuffle_xor(totals[i], lanes);
        }
        if (!is_there[i]) {
            continue;
        }
        const u64 at = ((u64) (stream * a.n_rows + rows[i]) * a.n_heads + heads[i]) * a.n_chunks + chunk;
        if (t == 0 && part == 0) {
            *(floats2 *) (a.totals + at * 2) = {largest[i], totals[i]};
        }
#pragma unroll
        for (int step = 0; step < OWN; step++) {
            const int of = part + step * SPLIT;
            for (int j = 0; j < 2 && of < STEPS; j++) {
                const float * sum = sums[step][j] + 2 * i;
                *(floats2 *) (a.sums + at * D + of * 16 + j * 8 + 2 * t) = {sum[0], sum[1]};
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

// That share a multiprocessor. Three of 64 queries with the longest heads in registers would spill, and desktop GPUs have
// memory for two.
constexpr int attention_blocks(int head_dim, int groups) {
    return head_dim > 128 ? 1 : head_dim == LONG_HEAD && groups == 4 ? 2 : 3;
}

}  // namespace few_rows

KERNEL(combine_chunks, few_rows::attention, few_rows::BLOCK_THREADS, 4) { few_rows::combine(arguments); }

#define FEW_ROWS_ATTENTION_OF(K, V, D, GROUPS) \
    KERNEL(attention_##K##_##V##_##D##_##GROUPS, few_rows::attention, few_rows::ATTENTION_THREADS, few_rows::attention_blocks(D, GROUPS)) { \
        few_rows::attend<few_rows::K##_cells, few_rows::V##_cells, D, GROUPS>(arguments); \
    }
// The kernels for blocks of 16, 32 and 64 queries.
#define FEW_ROWS_ATTENTION(K, V, D) \
    FEW_ROWS_ATTENTION_OF(K, V, D, 1) \
    FEW_ROWS_ATTENTION_OF(K, V, D, 2) \
    FEW_ROWS_ATTENTION_OF(K, V, D, 4)
