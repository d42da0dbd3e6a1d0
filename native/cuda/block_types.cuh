// The block types of GGUF files, one struct each: how a lane gets its weights out of a row's 256 elements. Layouts:
// ggml-common.h of llama.cpp. To add a type, add a struct, its two names at the end, and a line in the host's table.
//
// A row is taken in groups of 32 elements. Of each group, lane t of the four that share a row takes elements
// 8t to 8t + 7, as four registers of two halves: elements (0, 2), (1, 3), (4, 6), (5, 7). That is the order in which
// they come out of bytes with the fewest instructions; converted inputs lie in the same order.
//
// A half holds the element's integer times what scales groups of it inside the block, at most 4,064 in size: exact up
// to 2,048, and rounded to the nearest even above. The block's own scale follows in f32: once for the unit where
// SPAN is 8, for each group where it is 1.
#pragma once

namespace few_rows {

constexpr u32 twice(u32 half) { return half | half << 16; }
constexpr u32 MAGIC = twice(0x6400);  // 1024: a half whose low bits count in ones
constexpr u32 MAGIC_BYTES = 0x64646464;
constexpr u32 MINUS_1024 = twice(0xe400);

// A unit of a row that begins at a multiple of 16 bytes. Offsets are known when compiled; what differs by lane is a
// multiple of 4, for `words` of 8.
struct aligned_unit {
    static constexpr bool ALIGNED = true;
    const u8 * at;

    INLINE static u32 load(const u8 * from) { return *(const u32 *) from; }
    INLINE u32 word(int offset, int lane = 0) const {
        const u8 * from = at + (offset & ~3) + lane;
        return offset % 4 ? shift_right(load(from), load(from + 4), offset % 4 * 8) : load(from);
    }
    INLINE u32 half(int offset) const { return *(const u16 *) (at + offset); }
    INLINE words2 words(int offset, int lane = 0) const {
        if (offset % 8 == 0) {
            return *(const words2 *) (at + offset + lane);
        }
        const u8 * from = at + (offset & ~3) + lane;
        const u32 a = load(from), b = load(from + 4);
        if (offset % 4 == 0) {
            return {a, b};
        }
        return {shift_right(a, b, offset % 4 * 8), shift_right(b, load(from + 8), offset % 4 * 8)};
    }
};

// One that begins at a multiple of 4.
struct word_unit {
    const u8 * at;

    INLINE u32 load(int offset) const { return *(const u32 *) (at + offset); }
    INLINE u32 word(int offset, int lane = 0) const {
        const int from = (offset & ~3) + lane;
        return offset % 4 ? shift_right(load(from), load(from + 4), offset % 4 * 8) : load(from);
    }
    INLINE u32 half(int offset) const { return *(const u16 *) (at + offset); }
    INLINE words2 words(int offset, int lane = 0) const { return {word(offset, lane), word(offset + 4, lane)}; }
};

// One that begins anywhere: `phase` bytes behind a multiple of 16.
struct unaligned_unit {
    static constexpr bool ALIGNED = false;
    const u8 * at;
    int phase;

    INLINE u32 word(int offset, int lane = 0) const {
        const int off = phase + offset % 4;
        const u32 * from = (const u32 *) (at + (offset & ~3) + (off & ~3) + lane);
        return shift_right(from[0], from[1], (off & 3) * 8);
    }
    INLINE u32 half(int offset) const { return *(const u16 *) (at + phase + offset); }
    INLINE words2 words(int offset, int lane = 0) const {
        const int off = phase + offset % 4;
        const u32 * from = (const u32 *) (at + (offset & ~3) + (off & ~3) + lane);
        const u32 a = from[0], b = from[1], c = from[2], shift = (off & 3) * 8;
        return {shift_right(a, b, shift), shift_right(b, c, shift)};
    }
};

// Four bytes, each as 1024 + byte: (0, 2) and (1, 3).
DEVICE void spread(u32 bytes, u32 & even, u32 & odd) {
    even = pick_bytes(bytes, MAGIC_BYTES, 0x4240);
    odd = pick_bytes(bytes, MAGIC_BYTES, 0x4341);
}

// Eight bytes -> w, each less `zero`.
DEVICE void integers(words2 bytes, u32 minus_zero, u32 w[4]) {
    spread(bytes.x, w[0], w[1]);
    spread(bytes.y, w[2], w[3]);
    for (int i = 0; i < 4; i++) {
        w[i] = add_halves(w[i], minus_zero);
    }
}
DEVICE void scaled(u32 w[4], u32 scale) {
    for (int i = 0; i < 4; i++) {
        w[i] = multiply_halves(w[i], scale);
    }
}
// The scale of a lane's elements in group g, where a word has those of groups g & ~1 and g | 1, two for each.
DEVICE u32 scale_of_16(u32 scales, int g, int t, u32 minus_zero) {
    const u32 two = add_halves(pick_bytes(scales, MAGIC_BYTES, 0x4240 + 0x0101 * (t >> 1)), minus_zero);
    return g % 2 ? high_twice(two) : low_twice(two);
}
// The four low bits of `bits` -> one bit in each byte.
DEVICE u32 bits_to_bytes(u32 bits) { return (bits & 15) * 0x00204081 & 0x01010101; }

// Elements 8t to 8t + 7 of a block of 32 whose 16 bytes hold elements 0 to 15 in the low and 16 to 31 in the high bits.
template <class Unit> DEVICE words2 split_nibbles(const Unit & unit, int offset, int t) {
    const words2 q = unit.words(offset, 8 * (t & 1));
    const int shift = 4 * (t >> 1);
    return {q.x >> shift & 0x0f0f0f0f, q.y >> shift & 0x0f0f0f0f};
}

// The four nibbles of a word whose bytes are all below 16 -> bytes of a table of sixteen, given as four words.
template <u32 A, u32 B, u32 C, u32 D> DEVICE u32 look_up(u32 nibbles) {
    const u32 packed = pick_bytes(nibbles | nibbles >> 4, 0, 0x4420) & 0x7777;
    const u32 low = pick_bytes(A, B, packed), high = pick_bytes(C, D, packed);
    const u32 upper = (nibbles >> 3 & 0x01010101) * 0xff;
    return (low & ~upper) | (high & upper);
}
// The values of IQ4_NL and IQ4_XS, plus 128.
DEVICE words2 nonlinear(words2 nibbles) {
    return {look_up<0x3f2d1801, 0x766a5d4f, 0xa6998d81, 0xf1d9c5b5>(nibbles.x),
            look_up<0x3f2d1801, 0x766a5d4f, 0xa6998d81, 0xf1d9c5b5>(nibbles.y)};
}
// 0 1 2 3 4 6 8 12 and their negatives, plus 128.
DEVICE words2 mxfp4_values(words2 nibbles) {
    return {look_up<0x83828180, 0x8c888684, 0x7d7e7f80, 0x74787a7c>(nibbles.x),
            look_up<0x83828180, 0x8c888684, 0x7d7e7f80, 0x74787a7c>(nibbles.y)};
}

template <class Unit> struct q4_k {
    static constexpr int BYTES = 144, SPAN = 8;
    static constexpr bool MINS = true;
    Unit unit;
    int t;
    u32 d, scales[2], mins[2];

    INLINE q4_k(Unit unit, int t) : unit(unit), t(t) { read_header(unit.words(0), unit.words(8)); }
    INLINE void read_header(words2 a, words2 b) {
        d = a.x;
        scales[0] = a.y & 0x3f3f3f3f;
        scales[1] = (b.y & 0x0f0f0f0f) | (a.y >> 2 & 0x30303030);
        mins[0] = b.x & 0x3f3f3f3f;
        mins[1] = (b.y >> 4 & 0x0f0f0f0f) | (b.x >> 2 & 0x30303030);
    }
    // The scales of groups 2j and 2j + 1 as halves, times their factors.
    INLINE u32 scale_pair(int j, u32 factors, u32 minus) const {
        const u32 two = pick_bytes(scales[j / 2], MAGIC_BYTES, j % 2 ? 0x4342 : 0x4140);
        return multiply_add_halves(two, factors, minus);
    }
    INLINE void group(int g, u32 w[4]) const {
        // Halves 1024 + q become scale * q in one instruction: (1024 + q) * scale - 1024 * scale. The high bits
        // count in sixteens, so their scale is a sixteenth.
        const words2 q = unit.words(16 + g / 2 * 32, 8 * t);
        const u32 scales_of_two = scale_pair(g / 2, 0x2c003c00, 0xd400e400);
        const u32 shifts = multiply_halves(scales_of_two, MINUS_1024);
        if (g % 2 == 0) {
            const u32 v[4] = {mask_or<0x000f000f, MAGIC>(q.x), mask_or<0x000f000f, MAGIC>(q.x >> 8),
                              mask_or<0x000f000f, MAGIC>(q.y), mask_or<0x000f000f, MAGIC>(q.y >> 8)};
            for (int i = 0; i < 4; i++) {
                w[i] = multiply_add_halves(v[i], low_twice(scales_of_two), low_twice(shifts));
            }
        } else {
            const u32 v[4] = {mask_or<0x00f000f0, MAGIC>(q.x), mask_or<0x00f000f0, MAGIC>(q.x >> 8),
                              mask_or<0x00f000f0, MAGIC>(q.y), mask_or<0x00f000f0, MAGIC>(q.y >> 8)};
            for (int i = 0; i < 4; i++) {
                w[i] = multiply_add_halves(v[i], high_twice(scales_of_two), high_twice(shifts));
            }
        }
    }
    INLINE float scale(int) const { return float_of_half(d & 0xffff); }
    INLINE float min_scale() const { return -float_of_half(d >> 16); }
    INLINE u32 minimum(int i) const { return add_halves(pick_bytes(mins[i], MAGIC_BYTES, 0x4040 + 0x0101 * t), MINUS_1024); }
};

template <class Unit> struct q5_k : q4_k<Unit> {
    static constexpr int BYTES = 176;
    INLINE q5_k(Unit unit, int t) : q4_k<Unit>(unit, t) {}
    INLINE void group(int g, u32 w[4]) const {
        const words2 q = this->unit.words(48 + g / 2 * 32, 8 * this->t), h = this->unit.words(16, 8 * this->t);
        const int shift = g % 2 * 4;
        const words2 fifth = g < 4 ? words2{h.x << (4 - g), h.y << (4 - g)} : words2{h.x >> (g - 4), h.y >> (g - 4)};
        const words2 y = {(q.x >> shift & 0x0f0f0f0f) | (fifth.x & 0x10101010),
                          (q.y >> shift & 0x0f0f0f0f) | (fifth.y & 0x10101010)};
        const u32 scales_of_two = this->scale_pair(g / 2, 0x3c003c00, 0xe400e400);
        const u32 shifts = multiply_halves(scales_of_two, MINUS_1024);
        spread(y.x, w[0], w[1]);
        spread(y.y, w[2], w[3]);
        for (int i = 0; i < 4; i++) {
            w[i] = g % 2 ? multiply_add_halves(w[i], high_twice(scales_of_two), high_twice(shifts))
                         : multiply_add_halves(w[i], low_twice(scales_of_two), low_twice(shifts));
        }
    }
};

// Blocks with a signed scale for 16 elements, two to a group: lanes 0 and 1 have the first, 2 and 3 the second.
template <class Unit> struct q6_k {
    static constexpr int BYTES = 210, SPAN = 8;
    static constexpr bool MINS = false;
    Unit unit;
    int t;

    INLINE q6_k(Unit unit, int t) : unit(unit), t(t) {}
    INLINE void group(int g, u32 w[4]) const {
        // Halves 1024 + 4q become scale * (q - 32) in one instruction: (1024 + 4q) * scale / 4 - 288 * scale.
        const int h = g / 4, j = g % 4;
        const words2 q = unit.words(64 * h + 32 * (j % 2), 8 * t), high = unit.words(128 + 32 * h, 8 * t);
        spread(six_bits(q.x, high.x, j), w[0], w[1]);
        spread(six_bits(q.y, high.y, j), w[2], w[3]);
        const u32 scales = unit.word(192 + g / 2 * 4) ^ 0x80808080;
        const u32 two = pick_bytes(scales, MAGIC_BYTES, 0x4240 + 0x0101 * (t >> 1));
        const u32 quarters = multiply_add_halves(two, twice(0x3400), twice(0xdc80));  // less 1024 + 128
        const u32 shifts = multiply_halves(quarters, twice(0xe480));
        for (int i = 0; i < 4; i++) {
            w[i] = g % 2 ? multiply_add_halves(w[i], high_twice(quarters), high_twice(shifts))
                         : multiply_add_halves(w[i], low_twice(quarters), low_twice(shifts));
        }
    }
    // Four bytes, each four times the element.
    INLINE static u32 six_bits(u32 low, u32 high, int j) {
        return ((j < 2 ? low << 2 : low >> 2) & 0x3c3c3c3c) | (high << (6 - 2 * j) & 0xc0c0c0c0);
    }
    INLINE float scale(int) const { return float_of_half(unit.half(208)); }
};

template <class Unit> struct q3_k {
    static constexpr int BYTES = 110, SPAN = 8;
    static constexpr bool MINS = false;
    Unit unit;
    int t;
    u32 scales[4];

    INLINE q3_k(Unit unit, int t) : unit(unit), t(t) {
        const u32 a = unit.word(96), b = unit.word(100), high = unit.word(104);
        scales[0] = (a & 0x0f0f0f0f) | (high << 4 & 0x30303030);
        scales[1] = (b & 0x0f0f0f0f) | (high << 2 & 0x30303030);
        scales[2] = (a >> 4 & 0x0f0f0f0f) | (high & 0x30303030);
        scales[3] = (b >> 4 & 0x0f0f0f0f) | (high >> 2 & 0x30303030);
    }
    INLINE void group(int g, u32 w[4]) const {
        const words2 q = unit.words(32 + g / 4 * 32, 8 * t), mask = unit.words(0, 8 * t);
        const int shift = g % 4 * 2;
        integers({(q.x >> shift & 0x03030303) | (mask.x >> g & 0x01010101) << 2,
                  (q.y >> shift & 0x03030303) | (mask.y >> g & 0x01010101) << 2},
                 twice(0xe404), w);  // less 1024 + 4
        scaled(w, scale_of_16(scales[g / 2], g, t, twice(0xe420)));
    }
    INLINE float scale(int) const { return float_of_half(unit.half(108)); }
};

template <class Unit> struct q2_k {
    static constexpr int BYTES = 84, SPAN = 8;
    static constexpr bool MINS = true;
    Unit unit;
    int t;
    u32 d;

    INLINE q2_k(Unit unit, int t)
        : unit(unit), t(t), d(unit.word(80)) {}
    INLINE void group(int g, u32 w[4]) const {
        const words2 q = unit.words(16 + g / 4 * 32, 8 * t);
        const int shift = g % 4 * 2;
        integers({q.x >> shift & 0x03030303, q.y >> shift & 0x03030303}, MINUS_1024, w);
        const u32 scales = unit.word(g / 2 * 4) & 0x0f0f0f0f;
        scaled(w, scale_of_16(scales, g, t, MINUS_1024));
    }
    INLINE float scale(int) const { return float_of_half(d & 0xffff); }
    INLINE float min_scale() const { return -float_of_half(d >> 16); }
    // Of the elements 16 c to 16 c + 15 with c = 2t and 2t + 1 (i = 0), or 8 more.
    INLINE u32 minimum(int i) const {
        const words2 mins = unit.words(8 * i);
        const u32 two = pick_bytes(mins.x, mins.y, 0x1010 + 0x2222 * t) >> 4 & 0x0f0f0f0f;
        return add_halves(pick_bytes(two, MAGIC_BYTES, 0x4140), MINUS_1024);
    }
};

template <class Unit> struct iq4_xs {
    static constexpr int BYTES = 136, SPAN = 8;
    static constexpr bool MINS = false;
    Unit unit;
    int t;
    u32 d, low;

    INLINE iq4_xs(Unit unit, int t) : unit(unit), t(t), d(unit.word(0)), low(unit.word(4)) {}
    INLINE void group(int g, u32 w[4]) const {
        integers(nonlinear(split_nibbles(unit, 8 + 16 * g, t)), twice(0xe480), w);  // less 1024 + 128
        const u32 six = (low >> 4 * g & 15) | (d >> (16 + 2 * g) & 3) << 4;
        scaled(w, add_halves(six * 0x00010001 | MAGIC, twice(0xe420)));
    }
    INLINE float scale(int) const { return float_of_half(d & 0xffff); }
};

#ifdef FEW_ROWS_GRIDS  // whoever needs these types brings their tables, four bytes each: iq3_xxs_grid, iq3_s_grid

// Eight elements of a table's entries, with the signs of eight bits.
DEVICE void signed_grid(u32 first, u32 second, u32 signs, u32 w[4]) {
    const u32 a = bits_to_bytes(signs), b = bits_to_bytes(signs >> 4);
    // 128 - x is 128 + ~x + 1 in a byte; no entry is 0.
    integers({((first ^ a * 0xff) + a) ^ 0x80808080, ((second ^ b * 0xff) + b) ^ 0x80808080}, twice(0xe480), w);
}

template <class Unit> struct iq3_xxs {
    static constexpr int BYTES = 98, SPAN = 8;
    static constexpr bool MINS = false;
    Unit unit;
    int t;

    INLINE iq3_xxs(Unit unit, int t) : unit(unit), t(t) {}
    INLINE void group(int g, u32 w[4]) const {
        const u32 q = unit.half(2 + 8 * g + 2 * t), scale_and_signs = unit.word(66 + 4 * g);
        const u32 seven = scale_and_signs >> 7 * t & 127;  // the eighth makes their number even
        const u32 four = seven ^ seven >> 4, two = four ^ four >> 2;
        signed_grid(iq3_xxs_grid[q & 255], iq3_xxs_grid[q >> 8], seven | (two ^ two >> 1) << 7, w);
        scaled(w, add_halves((2 * (scale_and_signs >> 28) + 1) * 0x00010001 | MAGIC, MINUS_1024));
    }
    INLINE float scale(int) const { return float_of_half(unit.half(0)) * 0.25f; }
};

template <class Unit> struct iq3_s {
    static constexpr int BYTES = 110, SPAN = 8;
    static constexpr bool MINS = false;
    Unit unit;
    int t;

    INLINE iq3_s(Unit unit, int t) : unit(unit), t(t) {}
    INLINE u32 byte(int offset) const { return unit.half(offset & ~1) >> 8 * (offset & 1) & 255; }
    INLINE void group(int g, u32 w[4]) const {
        const u32 q = unit.half(2 + 8 * g + 2 * t), ninth = byte(66 + g) >> 2 * t;
        signed_grid(iq3_s_grid[(q & 255) | (ninth << 8 & 256)], iq3_s_grid[q >> 8 | (ninth << 7 & 256)],
                    byte(74 + 4 * g + t), w);
        const u32 scale = byte(106 + g / 2) >> 4 * (g % 2) & 15;
        scaled(w, add_halves((2 * scale + 1) * 0x00010001 | MAGIC, MINUS_1024));
    }
    INLINE float scale(int) const { return float_of_half(unit.half(0)); }
};

#endif

// Blocks of 32 elements, eight to a unit, each with a scale of its own.
template <class Unit, int SIZE> struct block_of_32 {
    static constexpr int BYTES = 8 * SIZE, SPAN = 1;
    static constexpr bool MINS = false;
    Unit unit;
    int t;
    INLINE block_of_32(Unit unit, int t) : unit(unit), t(t) {}
    INLINE float scale(int g) const { return float_of_half(unit.half(SIZE * g)); }
};

template <class Unit> struct q8_0 : block_of_32<Unit, 34> {
    using block_of_32<Unit, 34>::block_of_32;
    INLINE void group(int g, u32 w[4]) const {
        const words2 q = this->unit.words(34 * g + 2, 8 * this->t);
        integers({q.x ^ 0x80808080, q.y ^ 0x80808080}, twice(0xe480), w);
    }
};

template <class Unit> struct q4_0 : block_of_32<Unit, 18> {
    using block_of_32<Unit, 18>::block_of_32;
    INLINE void group(int g, u32 w[4]) const {
        integers(split_nibbles(this->unit, 18 * g + 2, this->t), twice(0xe408), w);
    }
};

template <class Unit> struct iq4_nl : block_of_32<Unit, 18> {
    using block_of_32<Unit, 18>::block_of_32;
    INLINE void group(int g, u32 w[4]) const {
        integers(nonlinear(split_nibbles(this->unit, 18 * g + 2, this->t)), twice(0xe480), w);
    }
};

template <class Unit> struct q5_0 : block_of_32<Unit, 22> {
    using block_of_32<Unit, 22>::block_of_32;
    INLINE void group(int g, u32 w[4]) const {
        const u32 fifth = this->unit.word(22 * g + 2) >> 8 * this->t;
        const words2 q = split_nibbles(this->unit, 22 * g + 6, this->t);
        integers({q.x | bits_to_bytes(fifth) << 4, q.y | bits_to_bytes(fifth >> 4) << 4}, twice(0xe410), w);
    }
};

// Blocks that add a minimum: [scale, minimum, ...], both halves.
template <class Unit, int SIZE> struct block_with_minimum : block_of_32<Unit, SIZE> {
    static constexpr bool MINS = true;
    using block_of_32<Unit, SIZE>::block_of_32;
    INLINE float min_scale() const { return 1.f; }
    INLINE u32 minimum(int i) const {
        return pick_bytes(this->unit.word(4 * SIZE * i, SIZE * this->t), 0, 0x3232);
    }
};

template <class Unit> struct q4_1 : block_with_minimum<Unit, 20> {
    using block_with_minimum<Unit, 20>::block_with_minimum;
    INLINE void group(int g, u32 w[4]) const {
        integers(split_nibbles(this->unit, 20 * g + 4, this->t), MINUS_1024, w);
    }
};

template <class Unit> struct q5_1 : block_with_minimum<Unit, 24> {
    using block_with_minimum<Unit, 24>::block_with_minimum;
    INLINE void group(int g, u32 w[4]) const {
        const u32 fifth = this->unit.word(24 * g + 4) >> 8 * this->t;
        const words2 q = split_nibbles(this->unit, 24 * g + 8, this->t);
        integers({q.x | bits_to_bytes(fifth) << 4, q.y | bits_to_bytes(fifth >> 4) << 4}, MINUS_1024, w);
    }
};

template <class Unit> struct mxfp4 : block_of_32<Unit, 17> {
    using block_of_32<Unit, 17>::block_of_32;
    INLINE void group(int g, u32 w[4]) const {
        integers(mxfp4_values(split_nibbles(this->unit, 17 * g + 1, this->t)), twice(0xe480), w);
    }
    INLINE float scale(int g) const {  // 2^(e - 128)
        const u32 e = this->unit.word(17 * g) & 0xff;
        return float_of_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
};

// Floats of 16 bits, which have no blocks: a lane's eight elements of a group are 16 bytes as they lie. What tensor
// cores take of them and of those of the row eight below is made once for all columns.
struct f16 {
    struct operand { u32 a[2][4]; };

    INLINE static operand unpack(words4 upper, words4 lower) {
        return {{{pick_bytes(upper.x, upper.y, 0x5410), pick_bytes(lower.x, lower.y, 0x5410),
                  pick_bytes(upper.x, upper.y, 0x7632), pick_bytes(lower.x, lower.y, 0x7632)},
                 {pick_bytes(upper.z, upper.w, 0x5410), pick_bytes(lower.z, lower.w, 0x5410),
                  pick_bytes(upper.z, upper.w, 0x7632), pick_bytes(lower.z, lower.w, 0x7632)}}};
    }
    INLINE static void multiply(float c[4], const operand & w, words4 x) {
        multiply_tile(c, w.a[0][0], w.a[0][1], w.a[0][2], w.a[0][3], x.x, x.y);
        multiply_tile(c, w.a[1][0], w.a[1][1], w.a[1][2], w.a[1][3], x.z, x.w);
    }
};

// No half has the range of these, but what tensor cores take of an f32 holds both them and the halves of an input.
struct bf16 {
    struct operand { float a[4][4]; };

    INLINE static float low(u32 two) { return float_of_bits(two << 16); }
    INLINE static float high(u32 two) { return float_of_bits(two & 0xffff0000); }
    INLINE static operand unpack(words4 upper, words4 lower) {
        return {{{low(upper.x), low(lower.x), low(upper.y), low(lower.y)},
                 {high(upper.x), high(lower.x), high(upper.y), high(lower.y)},
                 {low(upper.z), low(lower.z), low(upper.w), low(lower.w)},
                 {high(upper.z), high(lower.z), high(upper.w), high(lower.w)}}};
    }
    INLINE static void multiply(float c[4], const operand & w, words4 x) {
        const u32 of[4] = {x.x, x.y, x.z, x.w};
        for (int i = 0; i < 4; i++) {
            multiply_short_tile(c, w.a[i][0], w.a[i][1], w.a[i][2], w.a[i][3], float_of_half(of[i] & 0xffff),
                                float_of_half(of[i] >> 16));
        }
    }
};

}  // namespace few_rows
