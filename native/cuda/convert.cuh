// The input of products: f32 columns -> halves, in the order in which the lanes of a tensor-core instruction take them.
//
// Each unit of 256 elements of a column is multiplied by a power of two, so that its largest element lies in
// [2^14, 2^15): no half overflows, and elements down to 2^-28 of the largest keep all 11 bits. One tile of
// eight columns of a unit is
//   halves  [8 groups][column * 4 + t][8]    elements 8t + (0 2 1 3 4 6 5 7) of the group
//   sums    [column * 4 + t][8]              of 16 elements each, over 32, in a high and a low half
//   scales  [column], f32                    what the unit's products are multiplied by
#pragma once

namespace few_rows {

constexpr int SUMS_AT = UNIT * TILE_COLUMNS * 2, SCALES_AT = SUMS_AT + 16 * TILE_COLUMNS * 4;
constexpr float SUM_SCALE = 32.f;  // a sum of 16 such elements could overflow a half

// One warp converts one unit of one column; lane l has its elements 8l to 8l + 7.
DEVICE void convert_unit(const float x[8], u8 * tile, int column, int lane) {
    float largest = 0.f;
    bool finite = true;
    for (int i = 0; i < 8; i++) {
        const float size = x[i] < 0.f ? -x[i] : x[i];
        largest = size > largest ? size : largest;
        finite = finite && size <= 3.4e38f;
    }
    largest = finite ? largest : float_of_bits(0x7f800000);
    for (int mask = 16; mask; mask /= 2) {
        const float other = shuffle_xor(largest, mask);
        largest = other > largest ? other : largest;
    }
    const int exponent = bits_of_float(largest) >> 23;
    // Infinities and NaNs stay what they are; below 2^-112 nothing is gained by more.
    const int factor = exponent == 255 ? 127 : exponent < 15 ? 253 : 268 - exponent;
    const float scale = float_of_bits(factor << 23);

    u32 w[4];
    float sum = 0.f;
    for (int i = 0; i < 4; i++) {
        const int first = i / 2 * 4 + i % 2;
        w[i] = halves_of(x[first] * scale, x[first + 2] * scale);
        sum += float_of_half(w[i] & 0xffff) + float_of_half(w[i] >> 16);
    }
    const int t = lane % 4;
    *(words4 *) (tile + (lane / 4 * 32 + column * 4 + t) * 16) = {w[0], w[1], w[2], w[3]};

    sum = (sum + shuffle_xor(sum, 1)) * (1.f / SUM_SCALE);  // of lanes 2c and 2c + 1
    const u32 high = halves_of(sum, 0.f) & 0xffff;
    const u32 low = halves_of(sum - float_of_half(high), 0.f) & 0xffff;
    if (lane % 2 == 0) {
        const int c = lane / 2;
        u16 * sums = (u16 *) (tile + SUMS_AT + (column * 4 + c % 8 / 2) * 16) + c / 8 * 2 + c % 2;
        sums[0] = (u16) high;
        sums[4] = (u16) low;
    }
    if (lane == 0) {
        *(float *) (tile + SCALES_AT + column * 4) = float_of_bits((254 - factor) << 23);
    }
}

// Eight elements of a column, zeros where there are none.
DEVICE void load_eight(const conversion & c, int column, int at, float x[8]) {
    floats4 a = {0.f, 0.f, 0.f, 0.f}, b = a;
    if (column < c.n_columns && at < c.k) {
        const float * from = c.x + column * c.stride + at;
        a = load_input(from);
        b = load_input(from + 4);
    }
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

DEVICE u8 * tile_of(const conversion & c, int unit, int column) {
    return c.out + ((u64) unit * c.n_tiles + column / TILE_COLUMNS) * TILE_BYTES;
}

// A warp for each unit of each column.
DEVICE void convert(const conversion & c, int block) {
    let_next_begin();
    wait_for_previous();
    const int warp = block * (BLOCK_THREADS / 32) + thread_index() / 32, lane = thread_index() % 32;
    const int columns = c.n_tiles * TILE_COLUMNS, unit = warp / columns, column = warp % columns;
    if (unit * UNIT >= c.k) {
        return;
    }
    float x[8];
    load_eight(c, column, unit * UNIT + lane * 8, x);
    convert_unit(x, tile_of(c, unit, column), column % TILE_COLUMNS, lane);
}

// A block for each column: RMS norm, its weights, and the conversion, as ggml has them in two kernels.
DEVICE void normalize(const normalization & n) {
    const conversion & c = n.input;
    const int column = block_x(), warp = thread_index() / 32, lane = thread_index() % 32;
    constexpr int WARPS = BLOCK_THREADS / 32;
    let_next_begin();
    wait_for_previous();
    float x[8], sum = 0.f;
    for (int unit = warp; unit * UNIT < c.k; unit += WARPS) {
        load_eight(c, column, unit * UNIT + lane * 8, x);
        for (int i = 0; i < 8; i++) {
            sum = multiply_add(x[i], x[i], sum);
        }
    }
    for (int mask = 16; mask; mask /= 2) {
        sum += shuffle_xor(sum, mask);
    }
    float * sums = (float *) shared_memory();
    if (lane == 0) {
        sums[warp] = sum;
    }
    sync_threads();
    sum = 0.f;
    for (int i = 0; i < WARPS; i++) {
        sum += sums[i];
    }
    const float scale = reciprocal_root(sum / c.k + n.epsilon);
    for (int unit = warp; unit * UNIT < c.k; unit += WARPS) {
        const int at = unit * UNIT + lane * 8;
        load_eight(c, column, at, x);
        if (column < c.n_columns && at < c.k) {
            for (int i = 0; i < 8; i += 4) {
                const floats4 w = load_input(n.weight + at + i);
                x[i] = scale * x[i] * w.x;
                x[i + 1] = scale * x[i + 1] * w.y;
                x[i + 2] = scale * x[i + 2] * w.z;
                x[i + 3] = scale * x[i + 3] * w.w;
                store_output(n.normal + column * n.normal_stride + at + i, {x[i], x[i + 1], x[i + 2], x[i + 3]});
            }
        }
        convert_unit(x, tile_of(c, unit, column), column % TILE_COLUMNS, lane);
    }
}

}  // namespace few_rows

KERNEL(convert_input, few_rows::conversion, few_rows::BLOCK_THREADS, 8) { few_rows::convert(arguments, few_rows::block_x()); }
KERNEL(normalize_input, few_rows::normalization, few_rows::BLOCK_THREADS, 4) { few_rows::normalize(arguments); }
