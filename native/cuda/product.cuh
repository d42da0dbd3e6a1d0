// Products of weight matrices with 1 to 64 columns, at the speed at which the weights are read.
//
// A block of eight warps takes 128 rows of a matrix and one part of their length; a warp takes 16 rows. Unit by unit of
// 256 elements, weights and converted inputs come into shared memory while the units before are multiplied. A lane
// makes halves of its weights (block_types.cuh), and tensor cores multiply 16 rows by 8 columns at a time.
//
// The order in which a column's products are added depends on the matrix alone: on its parts, units and groups. So a
// column has the same bits whether it comes alone or beside 63 others.
#pragma once

namespace few_rows {

constexpr int WARP_ROWS = 16, WARPS = BLOCK_ROWS / WARP_ROWS;

// A block type for units that are aligned, or not.
template <template <class> class Row, class Unit> struct block_type {
    using unit = Unit;
    using row = Row<Unit>;
    using row_of_words = Row<word_unit>;
    static constexpr bool ALIGNED = Unit::ALIGNED;
    static constexpr int BYTES = row::BYTES, PITCH = row_pitch(BYTES, ALIGNED), STAGES = weight_stages(PITCH);
    static constexpr int RING = STAGES * WARP_ROWS * PITCH;  // bytes of a warp's ring
};

// Floats that a lane reads from global memory into its registers.
template <class Row> struct float_type {
    using row = Row;
    static constexpr int RING = 0, GROUP_BYTES = 64;
};

template <class A, class B> constexpr bool SAME = false;
template <class A> constexpr bool SAME<A, A> = true;

INLINE unsigned long long address(const void * p) { return (unsigned long long) p; }

// The converted inputs of a block's columns, which lie side by side.
template <int TILES> struct inputs_beside {
    static constexpr bool DIRECT = false;
    const u8 * at;
    u64 step;  // from one unit to the next

    INLINE inputs_beside(const product & p) {
        const int n_tiles = p.n_columns <= 8 ? 1 : p.n_columns <= 16 ? 2 : p.n_columns <= 32 ? 4 : 8;
        at = p.x + (u64) block_z() * TILES * TILE_BYTES + thread_index() * 16;
        step = (u64) n_tiles * TILE_BYTES;
    }
    INLINE void copy(int unit, u8 * to) const {
#pragma unroll
        for (int n = 0; n < TILES * TILE_BYTES; n += BLOCK_THREADS * 16) {
            if (n + BLOCK_THREADS * 16 <= TILES * TILE_BYTES || n + thread_index() * 16 < TILES * TILE_BYTES) {
                copy_async(to + n + thread_index() * 16, at + unit * step + n);
            }
        }
    }
};

// The same, read by each lane where it needs them: from the caches, as all warps of a multiprocessor want the same. Of
// one tile, a lane whose column is not there has that of the last one.
template <int TILES> struct direct_inputs {
    static constexpr bool DIRECT = true;
    const product & p;

    INLINE direct_inputs(const product & p) : p(p) {}
    INLINE u32 step() const {  // bytes from one unit to the next
        return (p.n_columns <= 8 ? 1 : p.n_columns <= 16 ? 2 : p.n_columns <= 32 ? 4 : 8) * TILE_BYTES;
    }
    INLINE int of_lane() const {  // bytes from a tile on
        const int lane = thread_index() % 32, last = p.n_columns - block_z() * TILE_COLUMNS - 1;
        return (TILES > 1 || lane / 4 < last ? lane / 4 : last) * 64 + lane % 4 * 16;
    }
    INLINE u32 begin(int unit) const { return block_z() * (TILES * TILE_BYTES) + unit * step() + of_lane(); }
    // From there to the scales of the lane's results.
    INLINE int to_scales() const { return SCALES_AT + thread_index() % 4 * 8 - of_lane(); }
};

// Blocks of one tile read them so; all warps of a block must, as they wait for each other or do not.
template <int TILES, bool ARE_BLOCKS> struct inputs_of { using type = inputs_beside<TILES>; };
template <> struct inputs_of<1, true> { using type = direct_inputs<1>; };

// With `ring` bytes of shared memory for each warp: the sums of a warp's 16 rows and TILES * 8 columns over units
// [first, last) -> total, in a lane's share of each tile.
template <class T, int TILES, class Inputs>
INLINE void multiply_blocks(
    const Inputs & from_inputs, const matrix & m, int ring, int row0, int first, int last, float total[TILES][4]) {
    const int lane = thread_index() % 32, warp = thread_index() / 32, t = lane % 4;
    u8 * inputs = shared_memory();
    u8 * weights = inputs + (Inputs::DIRECT ? 0 : INPUT_STAGES * TILES * TILE_BYTES) + warp * ring;

    // Four lanes copy rows lane / 4 and lane / 4 + 8, 16 bytes in turn. What they copy at a time begins at a multiple of
    // 64 in memory: pieces that lie across such borders take a seventh longer.
    const int piece = lane % 4 * 16, end = m.rows - 1, upper = row0 + lane / 4 < end ? row0 + lane / 4 : end;
    const u32 to_lower = (upper + 8 < end ? 8 : end - upper) * (u32) m.row_bytes;
    int left = last - first;  // units
    const u8 * row = m.weights + (u64) upper * m.row_bytes + (u64) first * T::BYTES;  // at the unit
    u8 * const copied = weights + lane / 4 * T::PITCH;
    auto copy_weights = [&](int ahead, int stage) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u8 * from = row + i * to_lower + ahead * T::BYTES;
            const int phase = T::ALIGNED ? 0 : (int) address(from) & 15, at = piece - ((int) address(from) & 48);
            u8 * to = copied + (stage * WARP_ROWS + 8 * i) * T::PITCH + at;
            from += at - phase;
            constexpr int MOST = T::BYTES + (T::ALIGNED ? 0 : 14) + 48;
            const int rest = (int) m.row_bytes - (last - left + ahead) * T::BYTES;
            if (!T::ALIGNED && T::row::SPAN == 1 && rest < T::BYTES) {  // the rest of a row: zeros behind it
#pragma unroll
                for (int n = 0; n < MOST; n += 64) {
                    const int size = rest + phase - at - n;
                    if (n + at >= 0 && n + at < T::PITCH) {
                        copy_async(to + n, size > 0 ? from + n : from, size < 0 ? 0 : size < 16 ? size : 16);
                    }
                }
            } else {
#pragma unroll
                for (int n = 0; n < MOST; n += 64) {
                    if ((n > 0 || at >= 0) && (n + 64 <= T::BYTES || n + at < T::BYTES + phase)) {
                        copy_line_async(to + n, from + n);
                    }
                }
            }
        }
    };
    const bool in_words = m.row_bytes % 4 == 0;
    auto multiply_unit = [&](const auto & upper, const auto & lower, auto words, auto scale_of) {
        using row = typename T::row;
        float sums[TILES][4] = {}, chains[TILES][4] = {};
#pragma unroll
        for (int g = 0; g < 8; g++) {
            u32 a[4], b[4];
            upper.group(g, a);
            lower.group(g, b);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const words4 v = words(n, g * 512);
                float * chain = chains[n];
                multiply_tile(chain, a[0], b[0], a[1], b[1], v.x, v.y);
                multiply_tile(chain, a[2], b[2], a[3], b[3], v.z, v.w);
                if (row::SPAN == 1) {
                    const float s = upper.scale(g), l = lower.scale(g);
                    for (int i = 0; i < 4; i++) {
                        sums[n][i] = multiply_add(i < 2 ? s : l, chain[i], sums[n][i]);
                        chain[i] = 0.f;
                    }
                }
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            if (row::SPAN == 8) {
                const float s = upper.scale(0), l = lower.scale(0);
                for (int i = 0; i < 4; i++) {
                    sums[n][i] = (i < 2 ? s : l) * chains[n][i];
                }
            }
            if constexpr (row::MINS) {
                float mins[4] = {};
                const words4 v = words(n, SUMS_AT);
                const u32 a0 = upper.minimum(0), a1 = lower.minimum(0), a2 = upper.minimum(1), a3 = lower.minimum(1);
                multiply_tile(mins, a0, a1, a2, a3, v.x, v.y);
                multiply_tile(mins, a0, a1, a2, a3, v.z, v.w);
                const float s = upper.min_scale() * SUM_SCALE, l = lower.min_scale() * SUM_SCALE;
                for (int i = 0; i < 4; i++) {
                    sums[n][i] = multiply_add(i < 2 ? s : l, mins[i], sums[n][i]);
                }
            }
            const floats2 scale = scale_of(n);
            for (int i = 0; i < 4; i++) {
                total[n][i] = multiply_add(sums[n][i], i % 2 ? scale.y : scale.x, total[n][i]);
            }
        }
    };
    auto multiply_rows = [&](const u8 * w, auto words, auto scale_of) {
        const u8 * const upper = w + lane / 4 * T::PITCH;
        const u8 * const lower = upper + 8 * T::PITCH;
        if constexpr (T::ALIGNED) {
            multiply_unit(typename T::row({upper}, t), typename T::row({lower}, t), words, scale_of);
        } else {
            const int begin = (int) address(row) & 15, phases[2] = {begin, (int) (begin + to_lower) & 15};
            if (Inputs::DIRECT && in_words && begin % 4 == 0) {  // for all lanes
                using row = typename T::row_of_words;
                multiply_unit(row({upper + phases[0]}, t), row({lower + phases[1]}, t), words, scale_of);
            } else {
                using row = typename T::row;
                multiply_unit(row({upper, phases[0]}, t), row({lower, phases[1]}, t), words, scale_of);
            }
        }
    };

    // Weights wait for nobody: they come while the kernel before still runs.
    constexpr int AHEAD = T::STAGES - 1;
    int stage = 0;
    auto last_stage = [&] { return stage == 0 ? AHEAD : stage - 1; };
    auto step = [&] {
        stage = stage == AHEAD ? 0 : stage + 1;
        row += T::BYTES;
    };
    if constexpr (Inputs::DIRECT) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (i < left) {
                copy_weights(i, i);
            }
            copy_commit();
        }
        wait_for_previous();
        u32 at = from_inputs.begin(first);
        const u32 step_of_inputs = from_inputs.step();
#pragma unroll 1
        for (; left > 0; left--, at += step_of_inputs) {
            const u8 * const x = from_inputs.p.x + at;
            copy_wait<AHEAD - 1>();
            sync_warp();  // the unit has come for all lanes, and all have left the one whose place is filled now
            if (left > AHEAD) {
                copy_weights(AHEAD, last_stage());
            }
            copy_commit();
            multiply_rows(
                weights + stage * (WARP_ROWS * T::PITCH),
                [&](int n, int at) { return *(const words4 *) (x + n * TILE_BYTES + at); },
                [&](int n) { return *(const floats2 *) (x + n * TILE_BYTES + from_inputs.to_scales()); });
            step();
        }
    } else {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (i < left) {
                copy_weights(i, i);
            }
        }
        wait_for_previous();
        auto copy_inputs = [&](int unit, int at) { from_inputs.copy(unit, inputs + at * (TILES * TILE_BYTES)); };
        copy_inputs(first, 0);
        for (int i = 0; i < AHEAD; i++) {
            copy_commit();
        }
        for (; left > 0; left--) {
            copy_wait<AHEAD - 1>();
            sync_threads();  // the unit has come for all warps, and all have left the one whose place is filled now
            const int input_stage = (last - first - left) % INPUT_STAGES;
            if (left > 1) {
                copy_inputs(last - left + 1, 1 - input_stage);
            }
            copy_commit();
            if (left > AHEAD) {
                copy_weights(AHEAD, last_stage());
            }
            copy_commit();
            const u8 * const x = inputs + input_stage * (TILES * TILE_BYTES);
            multiply_rows(
                weights + stage * (WARP_ROWS * T::PITCH),
                [&](int n, int at) { return *(const words4 *) (x + n * TILE_BYTES + at + lane * 16); },
                [&](int n) { return *(const floats2 *) (x + n * TILE_BYTES + SCALES_AT + t * 8); });
            step();
        }
    }
}

// The same for floats, whose groups come into registers, some ahead of the one that is multiplied.
template <class T, int TILES, class Inputs>
INLINE void multiply_floats(const Inputs & from_inputs, const matrix & m, int row0, int first, int last,
                            float total[TILES][4]) {
    constexpr int AHEAD = TILES == 4 ? 2 : 4, BYTES = T::GROUP_BYTES;  // there is no room for more registers
    const int lane = thread_index() % 32, t = lane % 4, n_in_row = (int) (m.row_bytes / BYTES);
    int n_left = (last * 8 < n_in_row ? last * 8 : n_in_row) - first * 8;
    const u8 * rows[2];
    for (int i = 0; i < 2; i++) {
        const int row = row0 + lane / 4 + 8 * i;
        rows[i] = m.weights + (u64) (row < m.rows ? row : m.rows - 1) * m.row_bytes + (u64) first * 8 * BYTES + t * 16;
    }
    u8 * const inputs = shared_memory();
    words4 ahead[AHEAD][2];
    auto load = [&](int group) {  // zeros behind the end of a row
        for (int i = 0; i < 2; i++) {
            ahead[group % AHEAD][i] = group < n_left ? load_weights(rows[i] + group * BYTES) : words4{};
        }
    };
#pragma unroll
    for (int g = 0; g < AHEAD; g++) {
        load(g);
    }
    wait_for_previous();
    from_inputs.copy(first, inputs);
    copy_commit();
#pragma unroll 1
    for (int unit = first; unit < last; unit++) {
        copy_wait<0>();
        sync_threads();  // the unit's inputs have come, and all have left those whose place is filled now
        const int stage = (unit - first) % INPUT_STAGES;
        if (unit + 1 < last) {
            from_inputs.copy(unit + 1, inputs + (1 - stage) * (TILES * TILE_BYTES));
        }
        copy_commit();
        const u8 * const x = inputs + stage * (TILES * TILE_BYTES);
        float chains[TILES][4] = {};
#pragma unroll(TILES == 4 ? 4 : 8)
        for (int g = 0; g < 8; g++) {
            const auto w = T::row::unpack(ahead[g % AHEAD][0], ahead[g % AHEAD][1]);
            load(g + AHEAD);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                T::row::multiply(chains[n], w, *(const words4 *) (x + n * TILE_BYTES + (g * 32 + lane) * 16));
            }
        }
        for (int i = 0; i < 2; i++) {
            rows[i] += 8 * BYTES;
        }
        n_left -= 8;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const floats2 scale = *(const floats2 *) (x + n * TILE_BYTES + SCALES_AT + t * 8);
            for (int i = 0; i < 4; i++) {
                total[n][i] = multiply_add(chains[n][i], i % 2 ? scale.y : scale.x, total[n][i]);
            }
        }
    }
}

template <class T, int TILES, class Inputs>
INLINE void multiply_part(
    const Inputs & from_inputs, const matrix & m, int ring, int row0, int first, int last, float total[TILES][4]) {
    if constexpr (T::RING == 0) {
        multiply_floats<T, TILES>(from_inputs, m, row0, first, last, total);
    } else {
        multiply_blocks<T, TILES>(from_inputs, m, ring, row0, first, last, total);
    }
}

// True in the block that came last of those with a part of these rows: it has the sum of all parts in `total`.
template <int TILES> INLINE bool add_parts(const product & p, float total[TILES][4]) {
    const int parts = grid_y();
    const u64 block = (u64) block_z() * grid_x() + block_x();
    floats4 * mine = (floats4 *) p.partials + (block * parts + block_y()) * (BLOCK_THREADS * TILES) + thread_index();
    for (int n = 0; n < TILES; n++) {
        store_shared_sum(mine + n * BLOCK_THREADS, {total[n][0], total[n][1], total[n][2], total[n][3]});
    }
    sync_threads();
    u32 * last = (u32 *) shared_memory();
    if (thread_index() == 0) {
        *last = is_last(p.counters + block, parts);
    }
    sync_threads();
    if (!*last) {
        return false;
    }
    for (int n = 0; n < TILES; n++) {
        for (int i = 0; i < 4; i++) {
            total[n][i] = 0.f;
        }
    }
    const floats4 * part = (const floats4 *) p.partials + block * parts * (BLOCK_THREADS * TILES) + thread_index();
#pragma unroll 4
    for (int y = 0; y < parts; y++, part += BLOCK_THREADS * TILES) {
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const floats4 x = load_shared_sum(part + n * BLOCK_THREADS);
            total[n][0] += x.x;
            total[n][1] += x.y;
            total[n][2] += x.z;
            total[n][3] += x.w;
        }
    }
    sync_threads();  // all have read `last`
    return true;
}

// The activations of ggml's GLU operators, in the same words: ggml-cuda/unary.cuh.
INLINE float activate(int kind, float alpha, float limit, float gate, float up) {
    if (kind == SWIGLU) {
        return gate / (1.f + exp_of(-gate)) * up;
    }
    if (kind == GEGLU) {
        const float x = gate;
        return 0.5f * x * (1.f + tanh_of(0.79788456080286535587989211986876f * x * (1.f + 0.044715f * x * x))) * up;
    }
    const float x = gate < limit ? gate : limit, y = up < -limit ? -limit : up > limit ? limit : up;
    return x / (1.f + exp_of(alpha * -x)) * (1.f + y);
}

template <int TILES> INLINE void add_bias(const matrix & m, int upper, float total[TILES][4]) {
    if (m.bias) {
        for (int i = 0; i < 2; i++) {
            const int row = upper + i * 8 < m.rows ? upper + i * 8 : m.rows - 1;
            for (int n = 0; n < TILES; n++) {
                total[n][2 * i] += m.bias[row];
                total[n][2 * i + 1] += m.bias[row];
            }
        }
    }
}

// The warps with `up` hand it to those with the gate, and are done: false.
template <int TILES> INLINE bool activated(const product & p, float total[TILES][4]) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    floats4 * ups = (floats4 *) shared_memory() + (warp % (WARPS / 2) * 32 + lane) * TILES;
    sync_threads();
    if (warp >= WARPS / 2) {
        for (int n = 0; n < TILES; n++) {
            ups[n] = {total[n][0], total[n][1], total[n][2], total[n][3]};
        }
    }
    sync_threads();
    if (warp >= WARPS / 2) {
        return false;
    }
    for (int n = 0; n < TILES; n++) {
        const floats4 up = ups[n];
        total[n][0] = activate(p.activation, p.alpha, p.limit, total[n][0], up.x);
        total[n][1] = activate(p.activation, p.alpha, p.limit, total[n][1], up.y);
        total[n][2] = activate(p.activation, p.alpha, p.limit, total[n][2], up.z);
        total[n][3] = activate(p.activation, p.alpha, p.limit, total[n][3], up.w);
    }
    return true;
}

// The rows of a thread's warp.
struct warp_rows {
    int index;  // of the matrix
    int first;

    INLINE warp_rows(const product & p, int thread) : index(0) {
        const int warp = thread / 32;
        int block = block_x();
        if (p.activation) {
            index = warp / (WARPS / 2);
            first = block * (BLOCK_ROWS / 2) + warp % (WARPS / 2) * WARP_ROWS;
            return;
        }
        for (; index + 1 < p.n_matrices; index++) {
            const int blocks = (p.matrices[index].rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
            if (block < blocks) {
                break;
            }
            block -= blocks;
        }
        first = block * BLOCK_ROWS + warp * WARP_ROWS;
    }
};

template <class A, class B, int TILES> INLINE void multiply(const product & p) {
    const int units = (p.k + UNIT - 1) / UNIT, first = block_y() * p.units_per_part;
    const int last = first + p.units_per_part < units ? first + p.units_per_part : units;

    constexpr int ring = A::RING > B::RING ? A::RING : B::RING;
    using inputs = typename inputs_of<TILES, A::RING != 0 && B::RING != 0>::type;
    let_next_begin();
    float total[TILES][4] = {};
    const warp_rows from(p, thread_index());
    const matrix & of_warp = p.matrices[from.index];
    if (SAME<A, B> || of_warp.type == 0) {
        multiply_part<A, TILES>(inputs(p), of_warp, ring, from.first, first, last, total);
    } else if constexpr (!SAME<A, B>) {
        multiply_part<B, TILES>(inputs(p), of_warp, ring, from.first, first, last, total);
    }
    if (grid_y() > 1 && !add_parts<TILES>(p, total)) {
        return;
    }
    const int thread = afresh(thread_index()), lane = thread % 32;  // again, as no register holds it meanwhile
    const warp_rows to(p, thread);
    const matrix & m = p.matrices[to.index];
    const int upper = to.first + lane / 4;
    add_bias<TILES>(m, upper, total);
    if (p.activation && !activated<TILES>(p, total)) {
        return;
    }
    for (int n = 0; n < TILES; n++) {
        for (int i = 0; i < 4; i++) {
            const int row = upper + i / 2 * 8, column = (block_z() * TILES + n) * TILE_COLUMNS + lane % 4 * 2 + i % 2;
            if (row < m.rows && column < p.n_columns) {
                float y = total[n][i];
                if (m.gate) {
                    y *= 1.f / (1.f + exp_of(-m.gate[column]));
                }
                for (int r = 0; r < 2; r++) {
                    if (m.residuals[r]) {
                        y += m.residuals[r][column * m.residual_strides[r] + row];
                    }
                }
                m.out[column * m.out_stride + row] = y;
            }
        }
    }
}

// The converted inputs of an item's pairs, gathered from their columns. A thread copies from one column.
struct gathered_inputs {
    static constexpr bool DIRECT = false;
    const u8 * x;
    u32 halves, scale;  // bytes from there
    u32 step;           // from one unit to the next

    INLINE gathered_inputs(const expert_product & e, int pair) {
        const int column = e.n_inputs == 1 ? pair / e.n_used : pair;
        const u32 tile = column / TILE_COLUMNS * TILE_BYTES;
        x = e.base.x;
        halves = tile + thread_index() / 32 * 512 + column % TILE_COLUMNS * 64 + thread_index() % 4 * 16;
        scale = tile + SCALES_AT + column % TILE_COLUMNS * 4;
        step = e.n_tiles * TILE_BYTES;
    }
    INLINE static int place() { return thread_index() % 32 / 4; }
    INLINE void copy(int unit, u8 * to) const {
        static_assert(SUMS_AT == BLOCK_THREADS * 16 && SCALES_AT == SUMS_AT + 32 * 16, "a warp copies the sums");
        const u8 * const from = x + unit * step;
        copy_async(to + thread_index() * 16, from + halves);
        if (thread_index() < 32) {
            copy_async(to + SUMS_AT + thread_index() * 16, from + halves + SUMS_AT);
        } else if (thread_index() < 64 && thread_index() % 4 == 0) {
            copy_float_async(to + SCALES_AT + place() * 4, from + scale);
        }
    }
};

template <class A> INLINE void multiply_experts(const expert_product & e) {
    const product & p = e.base;
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    let_next_begin();
    wait_for_previous();
    const expert_item & item = e.items[block_z()];
    const int expert = item.expert, pair = item.pairs[gathered_inputs::place()];
    if (item.n == 0) {
        return;
    }
    int index = 0, row0 = block_x() * BLOCK_ROWS + warp * WARP_ROWS;
    if (p.activation) {
        index = warp / (WARPS / 2);
        row0 = block_x() * (BLOCK_ROWS / 2) + warp % (WARPS / 2) * WARP_ROWS;
    }
    matrix of_expert = p.matrices[index];
    of_expert.weights += expert * e.expert_bytes;
    const int units = (p.k + UNIT - 1) / UNIT, first = block_y() * p.units_per_part;
    const int last = first + p.units_per_part < units ? first + p.units_per_part : units;
    float total[1][4] = {};
    multiply_part<A, 1>(gathered_inputs(e, pair), of_expert, A::RING, row0, first, last, total);
    if (grid_y() > 1 && !add_parts<1>(p, total)) {
        return;
    }
    matrix m = p.matrices[index];  // and the item: read again, as no register holds them meanwhile
    m.bias += m.bias ? item.expert * e.expert_bias : 0;
    add_bias<1>(m, row0 + lane / 4, total);
    if (p.activation && !activated<1>(p, total)) {
        return;
    }
    for (int i = 0; i < 4; i++) {
        const int row = row0 + lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        if (row < m.rows && column < item.n) {
            const int to = item.pairs[column];
            m.out[to / e.n_used * e.out_row + to % e.n_used * m.out_stride + row] = total[0][i];
        }
    }
}

// One block puts what was chosen in order.
DEVICE void put_in_order(const choice & c) {
    int * const chosen = (int *) shared_memory();
    int * const n_of = chosen + MAX_PAIRS;      // pairs of each expert
    int * const before = n_of + MAX_EXPERTS;    // tiles of it and of those before
    const int n_pairs = c.n_rows * c.n_used;
    let_next_begin();
    wait_for_previous();
    for (int i = thread_index(); i < n_pairs; i += BLOCK_THREADS) {
        chosen[i] = c.ids[i / c.n_used * c.ids_row + i % c.n_used];
    }
    sync_threads();
    for (int expert = thread_index(); expert < MAX_EXPERTS; expert += BLOCK_THREADS) {
        int n = 0;
        for (int i = 0; i < n_pairs && expert < c.n_experts; i++) {
            n += chosen[i] == expert;
        }
        n_of[expert] = n;
        before[expert] = (n + TILE_COLUMNS - 1) / TILE_COLUMNS;
    }
    for (int by = 1; by < c.n_experts; by *= 2) {
        int sums[MAX_EXPERTS / BLOCK_THREADS];
        sync_threads();
        for (int i = 0; i < MAX_EXPERTS / BLOCK_THREADS; i++) {
            const int expert = thread_index() + i * BLOCK_THREADS;
            sums[i] = before[expert] + (expert >= by ? before[expert - by] : 0);
        }
        sync_threads();
        for (int i = 0; i < MAX_EXPERTS / BLOCK_THREADS; i++) {
            before[thread_index() + i * BLOCK_THREADS] = sums[i];
        }
    }
    sync_threads();
    for (int i = before[c.n_experts - 1] + thread_index(); i < most_items(n_pairs, c.n_experts); i += BLOCK_THREADS) {
        c.items[i].n = 0;
    }
    for (int expert = thread_index(); expert < c.n_experts; expert += BLOCK_THREADS) {
        const int n = n_of[expert], n_tiles = (n + TILE_COLUMNS - 1) / TILE_COLUMNS;
        expert_item * const items = c.items + before[expert] - n_tiles;
        int place = 0, pair = 0;
        for (int i = 0; i < n_pairs && place < n; i++) {
            if (chosen[i] == expert) {
                pair = i;
                items[place / TILE_COLUMNS].pairs[place % TILE_COLUMNS] = pair;
                place++;
            }
        }
        for (; place < n_tiles * TILE_COLUMNS; place++) {
            items[place / TILE_COLUMNS].pairs[place % TILE_COLUMNS] = pair;
        }
        for (int i = 0; i < n_tiles; i++) {
            const int left = n - i * TILE_COLUMNS;
            items[i].expert = expert;
            items[i].n = left < TILE_COLUMNS ? left : TILE_COLUMNS;
        }
    }
}

// Four warps have a row of the matrix and eight columns; beyond the last column they have that once more. Routers have
// few rows, and all that follows waits for them.
DEVICE void multiply_plain(const plain_product & p) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const int n_rows = p.matrices[0].rows + p.matrices[1].rows;
    const int at_row = block_x() * PLAIN_ROWS + warp / PLAIN_WARPS, any_row = at_row < n_rows ? at_row : n_rows - 1;
    const int index = any_row < p.matrices[0].rows ? 0 : 1, row = any_row - index * p.matrices[0].rows;
    const plain_matrix & m = p.matrices[index];
    let_next_begin();
    wait_for_previous();
    const float * columns[TILE_COLUMNS];
    for (int c = 0; c < TILE_COLUMNS; c++) {
        const int column = block_y() * TILE_COLUMNS + c;
        columns[c] = p.x + (column < p.n_columns ? column : p.n_columns - 1) * p.x_stride;
    }
    float sums[TILE_COLUMNS] = {};
#pragma unroll 2
    for (int at = (warp % PLAIN_WARPS * 32 + lane) * 4; at < p.k; at += PLAIN_WARPS * 128) {
        const floats4 w = load_input(m.weights + row * m.row + at);
        for (int c = 0; c < TILE_COLUMNS; c++) {
            const floats4 x = load_input(columns[c] + at);
            sums[c] = multiply_add(w.x, x.x, sums[c]);
            sums[c] = multiply_add(w.y, x.y, sums[c]);
            sums[c] = multiply_add(w.z, x.z, sums[c]);
            sums[c] = multiply_add(w.w, x.w, sums[c]);
        }
    }
    float * const of_warps = (float *) shared_memory();
    for (int c = 0; c < TILE_COLUMNS; c++) {
        for (int lanes = 16; lanes; lanes /= 2) {
            sums[c] += shuffle_xor(sums[c], lanes);
        }
        if (lane == 0) {
            of_warps[warp * TILE_COLUMNS + c] = sums[c];
        }
    }
    sync_threads();
    const int column = block_y() * TILE_COLUMNS + lane;
    if (warp % PLAIN_WARPS == 0 && lane < TILE_COLUMNS && at_row < n_rows && column < p.n_columns) {
        float sum = 0.f;
        for (int i = 0; i < PLAIN_WARPS; i++) {
            sum += of_warps[(warp + i) * TILE_COLUMNS + lane];
        }
        m.out[column * m.out_stride + row] = sum;
    }
}

#define FEW_ROWS_TYPE(NAME, row) \
    using NAME = block_type<row, aligned_unit>; \
    using NAME##_U = block_type<row, unaligned_unit>;

FEW_ROWS_TYPE(Q2_K, q2_k)
FEW_ROWS_TYPE(Q3_K, q3_k)
FEW_ROWS_TYPE(Q4_K, q4_k)
FEW_ROWS_TYPE(Q5_K, q5_k)
FEW_ROWS_TYPE(Q6_K, q6_k)
FEW_ROWS_TYPE(Q8_0, q8_0)
FEW_ROWS_TYPE(Q4_0, q4_0)
FEW_ROWS_TYPE(Q4_1, q4_1)
FEW_ROWS_TYPE(Q5_0, q5_0)
FEW_ROWS_TYPE(Q5_1, q5_1)
FEW_ROWS_TYPE(IQ4_NL, iq4_nl)
FEW_ROWS_TYPE(IQ4_XS, iq4_xs)
FEW_ROWS_TYPE(MXFP4, mxfp4)
using F16 = float_type<f16>;
using BF16 = float_type<bf16>;
#ifdef FEW_ROWS_GRIDS
FEW_ROWS_TYPE(IQ3_XXS, iq3_xxs)
FEW_ROWS_TYPE(IQ3_S, iq3_s)
#endif

// Blocks that share a multiprocessor. An expert's few units leave a block little time behind its first ones.
template <class A> constexpr int experts_blocks() { return A::RING == 0 ? 2 : 3; }

// With one tile, and one scale for a unit, there are registers for three.
template <class A, class B, int TILES> constexpr int product_blocks() {
    if constexpr (TILES == 1 && A::RING > 0 && B::RING > 0) {
        return A::row::SPAN == 8 && B::row::SPAN == 8 ? MOST_BLOCKS : 2;
    }
    return 2;
}

}  // namespace few_rows

KERNEL(order_choice, few_rows::chosen_input, few_rows::BLOCK_THREADS, 4) {
    if (few_rows::block_x() == 0) {
        few_rows::put_in_order(arguments.chosen);
    } else {
        few_rows::convert(arguments.input, few_rows::block_x() - 1);
    }
}

KERNEL(plain_product, few_rows::plain_product, few_rows::BLOCK_THREADS, 2) { few_rows::multiply_plain(arguments); }

#define FEW_ROWS_EXPERTS(A) \
    KERNEL(experts_##A, few_rows::expert_product, few_rows::BLOCK_THREADS, few_rows::experts_blocks<few_rows::A>()) { \
        few_rows::multiply_experts<few_rows::A>(arguments); \
    }

// The kernel for matrices of the block types A and B, and TILES * 8 columns: one such line for each that is needed.
#define FEW_ROWS_PRODUCT_BLOCKS(A, B, TILES) few_rows::product_blocks<few_rows::A, few_rows::B, TILES>()
#define FEW_ROWS_PRODUCT(A, B, TILES) \
    KERNEL(product_##A##_##B##_##TILES, few_rows::product, few_rows::BLOCK_THREADS, FEW_ROWS_PRODUCT_BLOCKS(A, B, TILES)) { \
        few_rows::multiply<few_rows::A, few_rows::B, TILES>(arguments); \
    }
