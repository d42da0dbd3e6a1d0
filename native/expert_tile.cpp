#include "expert_tile.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace dflash::expert_tile {

operand operand::at(void * memory, size_t n_blocks_of_all, size_t n_blocks) {
    auto * q = static_cast<int8_t *>(memory);
    auto * scale = reinterpret_cast<float *>(q + n_blocks_of_all * block_size);
    return {q, scale, reinterpret_cast<int32_t *>(scale + n_blocks_of_all), n_blocks};
}

#if defined(__x86_64__) && defined(__GNUC__)

namespace {

constexpr int block_bytes = 17;

// Twice the values of MXFP4, plus 12: what is multiplied by signed bytes must not be negative.
constexpr int shift = 12;
alignas(16) constexpr unsigned char shifted[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                   12, 11, 10, 9,  8,  6,  4,  0};

[[gnu::target("avx2")]] void round_block(const float * x, const operand & to, size_t of_row) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 v[4], most = _mm256_setzero_ps();
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        most = _mm256_max_ps(most, _mm256_andnot_ps(sign, v[i]));
    }
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    const float largest = _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
    const __m256 by = _mm256_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
    __m256i q[4], sum = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
        q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], by));
        sum = _mm256_add_epi32(sum, q[i]);
    }
    const __m256i packed =
        _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    // Packing works in halves.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to.q + of_row * block_size),
                        _mm256_permutevar8x32_epi32(packed, order));
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    to.sum[of_row] = _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
    to.scale[of_row] = largest / 127.0f;
}

inline const __m128i * at(const unsigned char * bytes) {
    return reinterpret_cast<const __m128i *>(bytes);
}

// Asks for as much of the same `n_rows` of the next tile as a block of them has: what follows in
// memory would be known by the processor, but rows side by side are not seen as one stream.
inline void fetch_next(const unsigned char * rows, int n_rows, size_t n_blocks, size_t block) {
    const unsigned char * part = rows + (n_blocks * n_outputs + block * n_rows) * block_bytes;
    for (int line = 0; line < n_rows * block_bytes; line += 64) {
        __builtin_prefetch(part + line, 0, 2);
    }
}

// Undoes `shift`. The sum of values that are no numbers may be any.
inline int32_t correction(int32_t sum) {
    return static_cast<int32_t>(static_cast<uint32_t>(sum) * -static_cast<uint32_t>(shift));
}

inline int32_t four(const int8_t * q) {
    int32_t all;
    std::memcpy(&all, q, sizeof all);
    return all;
}

// Exponents of MXFP4, in the lowest bytes, as floats: half of 2^(e - 127), as values are doubled.
[[gnu::target("avx2")]] inline __m256 scales_of(__m256i e) {
    const __m256i one = _mm256_set1_epi32(1);
    e = _mm256_max_epi32(_mm256_and_si256(e, _mm256_set1_epi32(255)), one);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(e, one), 23));
}

[[gnu::target("avx512f")]] inline __m512 scales_of(__m512i e) {
    const __m512i one = _mm512_set1_epi32(1);
    e = _mm512_max_epi32(_mm512_and_si512(e, _mm512_set1_epi32(255)), one);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(e, one), 23));
}

// 16 bytes of each of eight rows, four rows in a half of a vector.
struct rows_8 {
    __m256i z[4];

    [[gnu::target("avx2")]] rows_8(const unsigned char * first, size_t stride) {
        for (int r = 0; r < 4; r++) {
            z[r] = _mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_loadu_si128(at(first + r * stride))),
                _mm_loadu_si128(at(first + (r + 4) * stride)), 1);
        }
    }
};

// Eight outputs, with what AVX2 has.
[[gnu::target("avx2,fma")]] void multiply_8(const unsigned char * tile, const operand & x,
                                            const int32_t * rows, int n, float (*sums)[n_outputs]) {
    const size_t stride = x.n_blocks * block_bytes;
    const __m256i values = _mm256_broadcastsi128_si256(_mm_load_si128(at(shifted)));
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (size_t b = 0; b < x.n_blocks; b++) {
        const unsigned char * block = tile + b * block_bytes;
        fetch_next(tile, 8, x.n_blocks, b);
        const rows_8 head(block, stride), codes(block + 1, stride);
        const __m256i * z = codes.z;
        const __m256i a = _mm256_unpacklo_epi32(z[0], z[1]), c = _mm256_unpackhi_epi32(z[0], z[1]);
        const __m256i d = _mm256_unpacklo_epi32(z[2], z[3]), e = _mm256_unpackhi_epi32(z[2], z[3]);
        const __m256i p[4] = {_mm256_unpacklo_epi64(a, d), _mm256_unpackhi_epi64(a, d),
                              _mm256_unpacklo_epi64(c, e), _mm256_unpackhi_epi64(c, e)};
        __m256i w[8];
        for (int i = 0; i < 4; i++) {
            w[i] = _mm256_shuffle_epi8(values, _mm256_and_si256(p[i], low));
            w[4 + i] =
                _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(p[i], 4), low));
        }
        const __m256 scales =
            scales_of(_mm256_unpacklo_epi64(_mm256_unpacklo_epi32(head.z[0], head.z[1]),
                                            _mm256_unpacklo_epi32(head.z[2], head.z[3])));
        for (int i = 0; i < n; i++) {
            const size_t of_row = rows[i] * x.n_blocks + b;
            const int8_t * q = x.q + of_row * block_size;
            __m256i sum = _mm256_set1_epi32(correction(x.sum[of_row]));
            for (int half = 0; half < 8; half += 4) {
                // Four products of at most 24 * 127 * 2 fit into 16 bits.
                __m256i s = _mm256_maddubs_epi16(w[half], _mm256_set1_epi32(four(q + 4 * half)));
                for (int j = half + 1; j < half + 4; j++) {
                    s = _mm256_add_epi16(
                        s, _mm256_maddubs_epi16(w[j], _mm256_set1_epi32(four(q + 4 * j))));
                }
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(s, ones));
            }
            const __m256 by = _mm256_mul_ps(scales, _mm256_set1_ps(x.scale[of_row]));
            _mm256_storeu_ps(
                sums[i], _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), by, _mm256_loadu_ps(sums[i])));
        }
    }
}

struct rows_16 {
    __m512i z[4];

    [[gnu::target("avx512f")]] rows_16(const unsigned char * first, size_t stride) {
        for (int r = 0; r < 4; r++) {
            // A load under a mask, as an insertion takes the port of the shuffles.
            const auto row = [&](int i) { return _mm_loadu_si128(at(first + (r + i) * stride)); };
            z[r] = _mm512_castsi128_si512(row(0));
            z[r] = _mm512_mask_broadcast_i32x4(z[r], 0x00f0, row(4));
            z[r] = _mm512_mask_broadcast_i32x4(z[r], 0x0f00, row(8));
            z[r] = _mm512_mask_broadcast_i32x4(z[r], 0xf000, row(12));
        }
    }
};

[[gnu::target("avx512f,avx512bw,avx512vnni")]] void multiply_16(const unsigned char * tile,
                                                                const operand & x,
                                                                const int32_t * rows, int n,
                                                                float (*sums)[n_outputs]) {
    const size_t stride = x.n_blocks * block_bytes;
    const __m512i values = _mm512_broadcast_i32x4(_mm_load_si128(at(shifted)));
    const __m512i low = _mm512_set1_epi8(15);
    for (size_t b = 0; b < x.n_blocks; b++) {
        const unsigned char * block = tile + b * block_bytes;
        fetch_next(tile, 16, x.n_blocks, b);
        const rows_16 head(block, stride), codes(block + 1, stride);
        const __m512i * z = codes.z;
        const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), c = _mm512_unpackhi_epi32(z[0], z[1]);
        const __m512i d = _mm512_unpacklo_epi32(z[2], z[3]), e = _mm512_unpackhi_epi32(z[2], z[3]);
        const __m512i p[4] = {_mm512_unpacklo_epi64(a, d), _mm512_unpackhi_epi64(a, d),
                              _mm512_unpacklo_epi64(c, e), _mm512_unpackhi_epi64(c, e)};
        __m512i w[8];
        for (int i = 0; i < 4; i++) {
            w[i] = _mm512_shuffle_epi8(values, _mm512_and_si512(p[i], low));
            w[4 + i] =
                _mm512_shuffle_epi8(values, _mm512_and_si512(_mm512_srli_epi16(p[i], 4), low));
        }
        const __m512 scales =
            scales_of(_mm512_unpacklo_epi64(_mm512_unpacklo_epi32(head.z[0], head.z[1]),
                                            _mm512_unpacklo_epi32(head.z[2], head.z[3])));
        for (int i = 0; i < n; i++) {
            const size_t of_row = rows[i] * x.n_blocks + b;
            const int8_t * q = x.q + of_row * block_size;
            __m512i sum = _mm512_set1_epi32(correction(x.sum[of_row]));
            for (int j = 0; j < 8; j++) {
                sum = _mm512_dpbusd_epi32(sum, w[j], _mm512_set1_epi32(four(q + 4 * j)));
            }
            const __m512 by = _mm512_mul_ps(scales, _mm512_set1_ps(x.scale[of_row]));
            _mm512_storeu_ps(
                sums[i], _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), by, _mm512_loadu_ps(sums[i])));
        }
    }
}

using tile_function = void (*)(const unsigned char *, const operand &, const int32_t *, int,
                               float (*)[n_outputs]);

template <tile_function function, int width>
void multiply(const unsigned char * tile, const operand & x, const int32_t * rows, int n,
              float * const * outs) {
    float sums[most_rows][n_outputs] = {};
    for (int first = 0; first < n_outputs; first += width) {
        function(tile + first * x.n_blocks * block_bytes, x, rows, n,
                 reinterpret_cast<float (*)[n_outputs]>(&sums[0][first]));
    }
    for (int i = 0; i < n; i++) {
        std::copy_n(sums[i], n_outputs, outs[i]);
    }
}

// 512 rows of gpt-oss-120b's shape took 86 ms a layer with 16 threads and AVX-512, and 260 to 320
// where its experts were copied to an H200: so many threads would do 1,500 rows in that time, and
// these numbers leave room for GPUs that copy faster. AVX2 takes nearly twice as long.
constexpr kernels all[] = {{round_block, multiply<multiply_16, 16>, "AVX-512", 32},
                           {round_block, multiply<multiply_8, 8>, "AVX2", 16}};

bool has(const kernels & k) {
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return &k == &all[1]
               ? has_avx2
               : has_avx2 && __builtin_cpu_supports("avx512f") &&
                     __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni");
}

}  // namespace

const kernels * for_this_processor() {
    const auto * found = std::find_if(std::begin(all), std::end(all), has);
    return found == std::end(all) ? nullptr : found;
}

const kernels * named(const char * name) {
    const auto * found = std::find_if(std::begin(all), std::end(all), [&](const kernels & k) {
        return std::strcmp(k.name, name) == 0 && has(k);
    });
    return found == std::end(all) ? nullptr : found;
}

#else

const kernels * for_this_processor() { return nullptr; }
const kernels * named(const char *) { return nullptr; }

#endif

}  // namespace dflash::expert_tile
