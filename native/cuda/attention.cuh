// Attention of a few rows over a cache.
//
// A block takes a chunk of the cells, one head of keys and values, and up to 64 queries, which are all heads of all rows
// that read it. Cells come into shared memory in tiles, while those before are multiplied: each second tile is for warps
// of its own, a stream. Tensor cores multiply queries by keys; the scores become the queries' shares of the cells, in the
// same registers, and are multiplied by the values. At the end the streams' sums are put together, and a second kernel
// does so with the chunks. Exponentials are powers of two.
//
// What a query meets, and in which order, depends on its row's cells alone: a masked cell adds nothing to any bit.
#pragma once

namespace few_rows {

constexpr float LOG2_E = 1.4426950408889634f;
#define MINUS_INFINITY float_of_bits(0xff800000)

// How the cells of a cache come, and become halves.
struct F16_cells {
    static constexpr bool ARE_BLOCKS = false;
    INLINE static int phase(const u8 *) { return 0; }
    template <int D> INLINE static int bytes() { return D * 2; }
    INLINE static words4 eight(const u8 *, int) { return {}; }
};
struct Q8_0_cells {
    static constexpr bool ARE_BLOCKS = true;
    INLINE static int phase(const u8 * cell) { return (u64) cell % 16; }
    template <int D> INLINE static int bytes() { return D / 32 * 34; }
    INLINE static words4 eight(const u8 * cell, int i) {
        const u8 * block = cell + i / 4 * 34;
        const u64 at = (u64) block + 2 + i % 4 * 8;
        const u32 * q = (const u32 *) (at & ~3ull);
        const u32 scale = *(const u16 *) block * 0x10001u, shift = at % 4 * 8, a = q[0], b = q[1], c = q[2];
        const u32 four[2] = {shift_right(a, b, shift) ^ 0x80808080u, shift_right(b, c, shift) ^ 0x80808080u};
        u32 w[4];
        for (int i = 0; i < 4; i++) {
            const u32 two = pick_bytes(four[i / 2], MAGIC_BYTES, i % 2 ? 0x4342 : 0x4140);
            w[i] = multiply_halves(add_halves(two, twice(0xe480)), scale);  // less 1024 + 128
        }
        return {w[0], w[1], w[2], w[3]};
    }
};

// The first n cells behind `from`, and zeros for the others. A thread takes the same part of each cell: all else would be
// more instructions than the multiplications are.
template <class T, int D, int CELLS, int THREADS>
INLINE void copy_cells(u8 * to, const u8 * from, u64 stride, int n) {
    constexpr int PITCH = raw_pitch(D, T::ARE_BLOCKS), PARTS = T::ARE_BLOCKS ? PITCH / 16 : D / 8;
    constexpr int LANES = PARTS <= 8 ? 8 : PARTS <= 16 ? 16 : 32, STEP = THREADS / LANES;
    const int part = thread_index() % LANES * 16, first = thread_index() / LANES;
    if (part >= PARTS * 16) {
        return;
    }
    u32 at = first * (u32) stride + part;
    u8 * const own = to + first * PITCH + part;
#pragma unroll
    for (int i = 0; i < CELLS; i += STEP) {
        const int phase = T::phase(from + at);
        const bool is_there = first + i < n && (!T::ARE_BLOCKS || part < phase + T::template bytes<D>());
        copy_async(own + i * PITCH, from + at - phase, is_there ? 16 : 0);
        at += STEP * (u32) stride;
    }
}

template <class T, int D, int CELLS, int THREADS>
INLINE void convert_cells(u8 * to, const u8 * raw, const u8 * from, u64 stride, int first) {
#pragma unroll 4
    for (int i = thread_index(); i < CELLS * (D / 8); i += THREADS) {
        const int cell = i / (D / 8);
        const u8 * at = raw + cell * raw_pitch(D, T::ARE_BLOCKS) + T::phase(from + (first + cell) * stride);
        *(words4 *) (to + cell * cell_pitch(D) + i % (D / 8) * 16) = T::eight(at, i % (D / 8));
    }
}

// What a lane has of sixteen queries: of g and of g + 8.
template <int D> struct queries {
    float sums[D / 16][2][4], largest[2], totals[2];
};

// Sums are scaled again where a score is so much larger than the one that they are relative to: shares up to 256 are as
// good as those up to one, and most tiles have some query with a slightly larger score.
constexpr float FAR = 8.f;

// With GROUPS groups of sixteen queries in a block. How many they are, and how they are shared out, changes no bit.
template <class K, class V, int D, int GROUPS> INLINE void attend(const attention & a) {
    constexpr int STEPS = D / 16, TILE = tile_cells(D), CELLS = STREAMS * TILE, EIGHTS = TILE / 8, PITCH = cell_pitch(D);
    constexpr int OWN = warp_groups(D, GROUPS), THREADS = attention_threads(D, GROUPS), STAGES = ATTENTION_STAGES;
    const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
    const int warp = thread_index() / 32, part = warp % STREAMS, own = warp / STREAMS * OWN;
    const int kv_head = block_y() % a.n_kv_heads, stream = block_y() / a.n_kv_heads;
    const int group = a.n_heads / a.n_kv_heads, n_queries = a.n_rows * group;
    const int stage_bytes = attention_stage(D, GROUPS, group, K::ARE_BLOCKS, V::ARE_BLOCKS);
    constexpr int RAW_KEYS = CELLS * raw_pitch(D, K::ARE_BLOCKS), RAW_VALUES = CELLS * raw_pitch(D, V::ARE_BLOCKS);
    const int first_query = block_x() * GROUPS * GROUP_QUERIES;
    const int first_row = (int) (first_query * a.group_inverse >> 32);
    const int end_row = (int) ((first_query + GROUPS * GROUP_QUERIES - 1) * a.group_inverse >> 32) + 1;
    const int n_rows = (end_row < a.n_rows ? end_row : a.n_rows) - first_row;
    u8 * const stages = shared_memory();
    u8 * const key_halves = stages + STAGES * stage_bytes;
    u8 * const value_halves = key_halves + (K::ARE_BLOCKS ? CELLS * PITCH : 0);
    u8 * const queries_at = value_halves + (V::ARE_BLOCKS ? CELLS * PITCH : 0);
    constexpr bool SHARED = shares_queries(D, GROUPS);

    const int chunk = grid_z() - 1 - block_z();  // the longest ones first
    const int first = chunk_begin(chunk, a.n_kv_heads, D), end = chunk_begin(chunk + 1, a.n_kv_heads, D);
    const int last = end < a.n_cells ? end : a.n_cells;
    const u8 * const k = a.k + stream * a.k_stream + kv_head * a.k_head;
    const u8 * const v = a.v + stream * a.v_stream + kv_head * a.v_head;
    const u16 * const mask = a.mask + stream * a.mask_stream + first_row * a.mask_row;
    auto copy = [&](int cell, int stage) {
        u8 * const to = stages + stage * stage_bytes;
        if (cell < last) {
            copy_cells<K, D, CELLS, THREADS>(to, k + cell * a.k_cell, a.k_cell, last - cell);
            copy_cells<V, D, CELLS, THREADS>(to + RAW_KEYS, v + cell * a.v_cell, a.v_cell, last - cell);
            const int two = thread_index() % (CELLS / 2) * 2;
            if (cell + two < last) {
                int row = thread_index() / (CELLS / 2);
                const u16 * from = mask + row * a.mask_row + cell + two;
                u8 * of = to + RAW_KEYS + RAW_VALUES + row * mask_pitch(D) + two * 2;
                for (; row < n_rows; row += THREADS / (CELLS / 2)) {
                    copy_float_async(of, from);
                    from += THREADS / (CELLS / 2) * a.mask_row;
                    of += THREADS / (CELLS / 2) * mask_pitch(D);
                }
            }
        }
        copy_commit();
    };
    let_next_begin();
    wait_for_previous();
    for (int i = 0; i < STAGES - 1; i++) {
        copy(first + i * CELLS, i);
    }

    // Of the query g or g + 8 of a group: found again where it is needed, as registers are few.
    struct place {
        int row, head;
        bool is_there;
    };
    auto place_of = [&](int m, int i) {
        const int query = first_query + (own + m) * GROUP_QUERIES + g + 8 * i;
        const bool is_there = query < n_queries;
        const int row = is_there ? (int) (query * a.group_inverse >> 32) : first_row;
        return place{row, kv_head * group + (is_there ? query - row * group : 0), is_there};
    };
    int mask_rows[OWN][2];
    queries<D> q[OWN];
    // Where queries are shared, each stream brings every second sixteen dimensions of them.
    constexpr int LOADS = SHARED ? (STEPS + 1) / STREAMS : STEPS;
    auto step_of = [&](int load) {
        const int step = SHARED ? load * STREAMS + part : load;
        return step < STEPS ? step : STEPS - 1;
    };
    words4 * const kept = (words4 *) queries_at + own * STEPS * 32 + lane;
    u32 of[OWN][LOADS][4];  // all are loaded before the first one is stored, which waits for it
    const float scale = a.soft_cap == 0.f ? a.scale * LOG2_E : a.scale;
#pragma unroll
    for (int m = 0; m < OWN; m++) {
        for (int i = 0; i < 2; i++) {
            const place of_query = place_of(m, i);
            mask_rows[m][i] = (of_query.row - first_row) * mask_pitch(D) + part * TILE * 2 + t * 4;
            const float * from =
                a.q + stream * a.q_stream + of_query.row * a.q_row + of_query.head * a.q_head + 2 * t;
#pragma unroll
            for (int n = 0; n < LOADS; n++) {
                const floats2 x = load_two(from + step_of(n) * 16), y = load_two(from + step_of(n) * 16 + 8);
                of[m][n][i] = halves_of(x.x * scale, x.y * scale);
                of[m][n][i + 2] = halves_of(y.x * scale, y.y * scale);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < OWN && SHARED; m++) {
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            kept[(m * STEPS + step_of(n)) * 32] = {of[m][n][0], of[m][n][1], of[m][n][2], of[m][n][3]};
        }
    }
    for (int m = 0; m < OWN; m++) {
        q[m] = {{}, {MINUS_INFINITY, MINUS_INFINITY}, {}};
    }

    int stage = 0;
    for (int cell = first; cell < last; cell += CELLS) {
        copy_wait<STAGES - 2>();
        sync_threads();  // the cells have come for all warps, and all have left those whose place is filled now
        copy(cell + (STAGES - 1) * CELLS, stage == 0 ? STAGES - 1 : stage - 1);
        const u8 * const at = stages + stage * stage_bytes;
        if (K::ARE_BLOCKS) {
            convert_cells<K, D, CELLS, THREADS>(key_halves, at, k, a.k_cell, cell);
        }
        if (V::ARE_BLOCKS) {
            convert_cells<V, D, CELLS, THREADS>(value_halves, at + RAW_KEYS, v, a.v_cell, cell);
        }
        if (K::ARE_BLOCKS || V::ARE_BLOCKS) {
            sync_threads();
        }
        const u8 * const keys = (K::ARE_BLOCKS ? key_halves : at) +
                                (part * TILE + lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
        const u8 * const values =
            (V::ARE_BLOCKS ? value_halves : at + RAW_KEYS) + (part * TILE + lane % 16) * PITCH + lane / 16 * 16;
        const u8 * const masks = at + RAW_KEYS + RAW_VALUES;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        // Sums of every second step, where there are too few others to hide how long a multiplication takes.
        constexpr int TURNS = EIGHTS < 4 ? 2 : 1;
        float scores[OWN][EIGHTS][4] = {}, odd[OWN][EIGHTS][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            u32 x[OWN][4];
#pragma unroll
            for (int m = 0; m < OWN; m++) {
                if constexpr (SHARED) {
                    const words4 y = kept[(m * STEPS + step) * 32];
                    x[m][0] = y.x, x[m][1] = y.y, x[m][2] = y.z, x[m][3] = y.w;
                } else {
                    for (int i = 0; i < 4; i++) {
                        x[m][i] = of[m][step][i];
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < EIGHTS; n += 2) {
                u32 w[4];
                load_tiles(w, keys + n * 8 * PITCH + step * 32);
#pragma unroll
                for (int m = 0; m < OWN; m++) {
                    float(*to)[4] = step % TURNS ? odd[m] : scores[m];
                    multiply_tile(to[n], x[m][0], x[m][1], x[m][2], x[m][3], w[0], w[1]);
                    multiply_tile(to[n + 1], x[m][0], x[m][1], x[m][2], x[m][3], w[2], w[3]);
                }
            }
        }
        if (TURNS == 2) {
            for (int i = 0; i < OWN * EIGHTS * 4; i++) {
                scores[i / (EIGHTS * 4)][i / 4 % EIGHTS][i % 4] += odd[i / (EIGHTS * 4)][i / 4 % EIGHTS][i % 4];
            }
        }
        if (a.soft_cap != 0.f) {
            const float inverse = 1.f / a.soft_cap;
            for (int i = 0; i < OWN * EIGHTS * 4; i++) {
                float & s = scores[i / (EIGHTS * 4)][i / 4 % EIGHTS][i % 4];
                s = a.soft_cap * LOG2_E * tanh_of(s * inverse);
            }
        }
        float most[OWN][2], low[OWN][2];
        bool is_same = true;
#pragma unroll
        for (int m = 0; m < OWN; m++) {
            for (int i = 0; i < 2; i++) {
                most[m][i] = MINUS_INFINITY;
#pragma unroll
                for (int n = 0; n < EIGHTS; n++) {
                    const bool is_cell = cell + part * TILE + n * 8 + 2 * t < last;
                    const u32 two = is_cell ? *(const u32 *) (masks + mask_rows[m][i] + n * 16) : twice(0xfc00);
                    float * s = scores[m][n] + 2 * i;
                    s[0] = multiply_add(float_of_half(two & 0xffff), LOG2_E, s[0]);
                    s[1] = multiply_add(float_of_half(two >> 16), LOG2_E, s[1]);
                    most[m][i] = larger(larger(most[m][i], s[0]), s[1]);
                }
                for (int lanes = 1; lanes < 4; lanes *= 2) {
                    most[m][i] = larger(most[m][i], shuffle_xor(most[m][i], lanes));
                }
                const bool is_far = most[m][i] > q[m].largest[i] + FAR;
                is_same = is_same && !is_far;
                most[m][i] = is_far ? most[m][i] : q[m].largest[i];
                low[m][i] = most[m][i] == MINUS_INFINITY ? 0.f : most[m][i];
            }
        }
        if (!is_same) {
#pragma unroll
            for (int m = 0; m < OWN; m++) {
                for (int i = 0; i < 2; i++) {
                    const float factor = exp2_of(q[m].largest[i] - low[m][i]);
                    q[m].largest[i] = most[m][i];
                    q[m].totals[i] *= factor;
#pragma unroll
                    for (int step = 0; step < STEPS; step++) {
                        for (int j = 0; j < 4; j++) {
                            q[m].sums[step][j / 2][2 * i + j % 2] *= factor;
                        }
                    }
                }
            }
        }
        u32 shares[OWN][EIGHTS][2];
#pragma unroll
        for (int n = 0; n < EIGHTS; n++) {
#pragma unroll
            for (int m = 0; m < OWN; m++) {
                for (int i = 0; i < 2; i++) {
                    const float * s = scores[m][n] + 2 * i;
                    const float p0 = exp2_of(s[0] - low[m][i]), p1 = exp2_of(s[1] - low[m][i]);
                    q[m].totals[i] += p0;
                    q[m].totals[i] += p1;
                    shares[m][n][i] = halves_of(p0, p1);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < EIGHTS; n += 2) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                u32 w[4];
                load_transposed(w, values + n * 8 * PITCH + step * 32);
#pragma unroll
                for (int m = 0; m < OWN; m++) {
                    const u32 p[4] = {shares[m][n][0], shares[m][n][1], shares[m][n + 1][0], shares[m][n + 1][1]};
                    multiply_tile(q[m].sums[step][0], p[0], p[1], p[2], p[3], w[0], w[1]);
                    multiply_tile(q[m].sums[step][1], p[0], p[1], p[2], p[3], w[2], w[3]);
                }
            }
        }
    }

    // The streams' sums put together: each has every second sixteen dimensions, and gives away the others.
    copy_wait<0>();
    sync_threads();
    constexpr int PAIRS = (STEPS + 1) / 2, GIVEN = given_bytes(D) / 512;
    floats4 * const given = (floats4 *) stages + own * STREAMS * GIVEN * 32 + lane;
#pragma unroll
    for (int m = 0; m < OWN; m++) {
        for (int i = 0; i < 2; i++) {
            for (int lanes = 1; lanes < 4; lanes *= 2) {
                q[m].totals[i] += shuffle_xor(q[m].totals[i], lanes);
            }
        }
        floats4 * to = given + (m * STREAMS + part) * GIVEN * 32;
        to[0] = {q[m].largest[0], q[m].largest[1], q[m].totals[0], q[m].totals[1]};
#pragma unroll
        for (int n = 0; n < PAIRS; n++) {
            for (int j = 0; j < 2; j++) {
                float * even = q[m].sums[2 * n][j];
                const float * odd = 2 * n + 1 < STEPS ? q[m].sums[2 * n + 1][j] : even;
                to[(1 + n * 2 + j) * 32] = part == 0 ? floats4{odd[0], odd[1], odd[2], odd[3]}
                                                     : floats4{even[0], even[1], even[2], even[3]};
                for (int i = 0; i < 4; i++) {
                    even[i] = part == 0 ? even[i] : odd[i];
                }
            }
        }
    }
    sync_threads();
#pragma unroll
    for (int m = 0; m < OWN; m++) {
        const floats4 * from = given + (m * STREAMS + 1 - part) * GIVEN * 32;
        const floats4 of = from[0];
        float mine[2], other[2];
        bool is_there[2];
        u64 at[2];
        for (int i = 0; i < 2; i++) {
            const float largest = i ? of.y : of.x, total = i ? of.w : of.z;
            const float most = larger(largest, q[m].largest[i]), low = most == MINUS_INFINITY ? 0.f : most;
            mine[i] = exp2_of(q[m].largest[i] - low);
            other[i] = exp2_of(largest - low);
            const place of_query = place_of(m, i);
            is_there[i] = of_query.is_there;
            at[i] = ((u64) (stream * a.n_rows + of_query.row) * a.n_heads + of_query.head) * a.n_chunks + chunk;
            const float sum = q[m].totals[i] * mine[i] + total * other[i];
            const float inverse = sum == 0.f ? 0.f : 1.f / sum;
            mine[i] *= inverse;
            other[i] *= inverse;
            if (t == 0 && part == 0 && is_there[i]) {
                *(floats2 *) (a.totals + at[i] * 2) = {most, sum};
            }
        }
#pragma unroll
        for (int n = 0; n < PAIRS; n++) {
            u32 w[2][2];
            for (int j = 0; j < 2; j++) {
                const floats4 y = from[(1 + n * 2 + j) * 32];
                const float * sum = q[m].sums[2 * n][j];
                w[0][j] = halves_of(sum[0] * mine[0] + y.x * other[0], sum[1] * mine[0] + y.y * other[0]);
                w[1][j] = halves_of(sum[2] * mine[1] + y.z * other[1], sum[3] * mine[1] + y.w * other[1]);
            }
            const int step = 2 * n + part;
            for (int i = 0; i < 2; i++) {
                // Four elements for each lane, of which its neighbour has two.
                const u32 theirs = bits_of_float(shuffle_xor(float_of_bits(t % 2 ? w[i][0] : w[i][1]), 1));
                if (is_there[i] && step < STEPS) {
                    *(words2 *) (a.means + at[i] * D + step * 16 + t % 2 * 8 + t / 2 * 4) =
                        t % 2 ? words2{theirs, w[i][1]} : words2{w[i][0], theirs};
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
        const u16 * means = a.means + first * a.head_dim + at % a.head_dim;
#pragma unroll 8
        for (int chunk = warp; chunk < a.n_chunks; chunk += WARPS) {
            const floats2 of = totals[chunk];
            const words4 halves = *(const words4 *) (means + (u64) chunk * a.head_dim);
            const u32 w[4] = {halves.x, halves.y, halves.z, halves.w};
            float y[8];
            for (int i = 0; i < 8; i++) {
                y[i] = float_of_half(i % 2 ? w[i / 2] >> 16 : w[i / 2] & 0xffff) * of.y;
            }
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

// That share a multiprocessor, by their registers and shared memory.
constexpr int attention_blocks(int head_dim, int groups) {
    return head_dim > LONG_HEAD ? 4 / groups : head_dim > 64 && groups == 4 ? 2 : 3;
}

}  // namespace few_rows

KERNEL(combine_chunks, few_rows::attention, few_rows::BLOCK_THREADS, 2) { few_rows::combine(arguments); }

#define FEW_ROWS_ATTENTION_OF(K, V, D, GROUPS) \
    KERNEL(attention_##K##_##V##_##D##_##GROUPS, few_rows::attention, few_rows::attention_threads(D, GROUPS), few_rows::attention_blocks(D, GROUPS)) { \
        few_rows::attend<few_rows::K##_cells, few_rows::V##_cells, D, GROUPS>(arguments); \
    }
// The kernels for blocks of 16, 32 and 64 queries.
#define FEW_ROWS_ATTENTION(K, V, D) \
    FEW_ROWS_ATTENTION_OF(K, V, D, 1) \
    FEW_ROWS_ATTENTION_OF(K, V, D, 2) \
    FEW_ROWS_ATTENTION_OF(K, V, D, 4)
