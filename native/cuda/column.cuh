// A matrix of Q6_K blocks times one column, for drafts: in integers, with half as many instructions for a weight as the
// kernels of product.cuh, so nearer to the speed of the memory. Its sums are not theirs to the bit. Drafts need not be.
#pragma once

namespace few_rows {

// Eight elements of a column in bytes, and of their group of 32 the scale.
struct column_bytes {
    words2 bytes;
    int less;  // for six bits of weights, which count from -32
    float scale;
};

// A warp makes bytes of a unit of the converted input. Lane 4g + t has the elements of group g that lanes t take.
DEVICE column_bytes bytes_of_column(const u8 * tile, int lane) {
    const words4 v = *(const words4 *) (tile + (lane / 4 * 32 + lane % 4) * 16);
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};  // elements (0, 2), (1, 3), (4, 6), (5, 7)
    float x[8], largest = 1.f, nothing = 0.f;   // or NaN
    for (int i = 0; i < 8; i++) {
        const u32 pair = pairs[i / 4 * 2 + i % 2];
        x[i] = float_of_half(i % 4 < 2 ? pair & 0xffff : pair >> 16);
        const float size = x[i] < 0.f ? -x[i] : x[i];
        largest = size > largest ? size : largest;
        nothing = multiply_add(x[i], 0.f, nothing);
    }
    for (int mask = 2; mask; mask /= 2) {
        const float other = shuffle_xor(largest, mask);
        largest = other > largest ? other : largest;
        nothing += shuffle_xor(nothing, mask);
    }
    u32 words[2] = {};
    int sum = 0;
    for (int i = 0; i < 8; i++) {
        const int byte = rounded(x[i] * (127.f / largest));
        words[i / 4] |= (u32) (byte & 255) << (i % 4 * 8);
        sum += byte;
    }
    return {{words[0], words[1]}, -32 * sum, *(const float *) (tile + SCALES_AT) * (largest / 127.f) + nothing};
}

// A block that begins S bytes behind a multiple of eight.
template <int S> struct shifted_block {
    const u8 * at;  // that multiple

    INLINE words2 words(int offset) const {
        const words2 a = *(const words2 *) (at + offset);
        if (S == 0) {
            return a;
        }
        const words2 b = *(const words2 *) (at + offset + 8);
        return S == 4 ? words2{a.y, b.x}
             : S < 4  ? words2{shift_right(a.x, a.y, S % 4 * 8), shift_right(a.y, b.x, S % 4 * 8)}
                      : words2{shift_right(a.y, b.x, S % 4 * 8), shift_right(b.x, b.y, S % 4 * 8)};
    }
    INLINE float scale() const { return float_of_half(*(const u16 *) (at + 208 + S)); }
};

// A lane's share of a block, times that of the column. picks: how to pick its scale of each two in a group's four bytes.
template <int S>
INLINE float multiply_block(const shifted_block<S> & block, int t, const u32 picks[2], const column_bytes * column) {
    float sum = 0.f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const words2 q[2] = {block.words(64 * h + 8 * t), block.words(64 * h + 32 + 8 * t)};
        const words2 high = block.words(128 + 32 * h + 8 * t), scales = block.words(192 + 8 * h);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const column_bytes x = column[(4 * h + j) * 4];
            const words2 low = q[j % 2];
            const int shift = j / 2 * 4;
            const words2 upper = j < 2 ? words2{high.x << (4 - 2 * j), high.y << (4 - 2 * j)}
                                       : words2{high.x >> (2 * j - 4), high.y >> (2 * j - 4)};
            const u32 first = (low.x >> shift & 0x0f0f0f0f) | (upper.x & 0x30303030);
            const u32 second = (low.y >> shift & 0x0f0f0f0f) | (upper.y & 0x30303030);
            const int scale = pick_signed(j < 2 ? scales.x : scales.y, picks[j % 2]);
            const int product = scale * dot_bytes(second, x.bytes.y, dot_bytes(first, x.bytes.x, x.less));
            sum = multiply_add((float) product, x.scale, sum);
        }
    }
    return sum * block.scale();
}

// With rows of a multiple of four units, each at a multiple of eight bytes: so where a block begins there is known when
// compiled, for four units in turn.
template <class T> INLINE void multiply_column(const product & p) {
    const int lane = thread_index() % 32, warp = thread_index() / 32, t = lane % 4, units = p.k / UNIT;
    const matrix & m = p.matrices[0];
    column_bytes * const column = (column_bytes *) shared_memory();
    u8 * const weights = shared_memory() + column_input(units) + warp * T::RING;

    // A warp has every second row, as these begin alike in 16 bytes: then its lanes load from banks of their own.
    const int row0 = block_x() * BLOCK_ROWS + warp / 2 * (2 * WARP_ROWS) + warp % 2 + lane / 4 * 2;
    const u8 * rows[2];
    for (int i = 0; i < 2; i++) {
        const int at = row0 + WARP_ROWS * i;
        rows[i] = m.weights + (u64) (at < m.rows ? at : m.rows - 1) * m.row_bytes;
    }
    auto copy_weights = [&](int unit) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u8 * to = weights + (unit % 2 * WARP_ROWS + 8 * i + lane / 4) * T::PITCH + t * 16;
            const u8 * from = rows[i] + (u64) unit * T::BYTES;
            const int phase = (int) address(from) & 15;
            from += t * 16 - phase;
#pragma unroll
            for (int n = 0; n < T::BYTES + 14; n += 64) {
                if (n + 64 <= T::BYTES || n + t * 16 < T::BYTES + phase) {
                    copy_async(to + n, from + n);
                }
            }
        }
    };

    let_next_begin();
    copy_weights(0);
    copy_commit();
    wait_for_previous();
    for (int unit = warp; unit < units; unit += WARPS) {
        column[unit * 32 + lane] = bytes_of_column(p.x + (u64) unit * TILE_BYTES, lane);
    }
    sync_threads();

    u32 picks[2];
    for (int i = 0; i < 2; i++) {
        const u32 byte = 2 * i + (t >> 1);
        picks[i] = byte + (byte + 8) * 0x1110;
    }
    float total[2] = {};
    auto multiply_unit = [&](auto known, int unit) {
        copy_wait<0>();
        sync_warp();  // the unit has come for all lanes, and all have left the one before
        if (unit + 1 < units) {
            copy_weights(unit + 1);
        }
        copy_commit();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u8 * row = weights + (unit % 2 * WARP_ROWS + 8 * i + lane / 4) * T::PITCH;
            const decltype(known) block = {row + ((int) (address(rows[i]) + unit * T::BYTES) & 8)};
            total[i] += multiply_block(block, t, picks, column + unit * 32 + t);
        }
    };
#pragma unroll 1
    for (int unit = 0; unit < units; unit += 4) {
        multiply_unit(shifted_block<0>{}, unit);
        multiply_unit(shifted_block<T::BYTES % 8>{}, unit + 1);
        multiply_unit(shifted_block<T::BYTES * 2 % 8>{}, unit + 2);
        multiply_unit(shifted_block<T::BYTES * 3 % 8>{}, unit + 3);
    }
    for (int i = 0; i < 2; i++) {
        total[i] += shuffle_xor(total[i], 1);
        total[i] += shuffle_xor(total[i], 2);
        const int row = row0 + WARP_ROWS * i;
        if (t == 0 && row < m.rows) {
            m.out[row] = total[i];
        }
    }
}

}  // namespace few_rows

#define FEW_ROWS_COLUMN(A) \
    KERNEL(column_##A, few_rows::product, few_rows::BLOCK_THREADS, 3) { few_rows::multiply_column<few_rows::A>(arguments); }
