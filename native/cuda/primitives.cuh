// The instructions that the kernels are made of, each under a name of its own. There is a second set of them that
// runs on a CPU (tests/native/emulated_gpu.h), so the kernels' text says nothing of PTX.
#pragma once

#define INLINE __device__ __forceinline__
#define DEVICE static INLINE
// A kernel whose registers let `blocks` blocks of so many threads share a multiprocessor.
#define KERNEL(name, parameters, threads, blocks) \
    extern "C" __global__ __launch_bounds__(threads, blocks) void name(const __grid_constant__ parameters arguments)

namespace few_rows {

// Blocks of a product for which a multiprocessor has shared memory.
#if __CUDA_ARCH__ >= 900
constexpr int MOST_BLOCKS = 3;
#else
constexpr int MOST_BLOCKS = 2;
#endif

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;

struct alignas(8) words2 { u32 x, y; };
struct alignas(16) words4 { u32 x, y, z, w; };
struct alignas(8) floats2 { float x, y; };
struct alignas(16) floats4 { float x, y, z, w; };

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_x() { return blockIdx.x; }
DEVICE int block_y() { return blockIdx.y; }
DEVICE int block_z() { return blockIdx.z; }
DEVICE int grid_x() { return gridDim.x; }
DEVICE int grid_y() { return gridDim.y; }
DEVICE int grid_z() { return gridDim.z; }

DEVICE u8 * shared_memory() {
    extern __shared__ __align__(16) u8 memory[];
    return memory;
}

// `high` or nothing: bytes [shift / 8, shift / 8 + 4) of the eight bytes low, high.
DEVICE u32 shift_right(u32 low, u32 high, u32 shift) { return __funnelshift_r(low, high, shift); }
DEVICE u32 pick_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
// (a & mask) | other in one instruction: of two constants the compiler makes two.
template <u32 MASK, u32 OTHER> DEVICE u32 mask_or(u32 a) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "n"(MASK), "n"(OTHER));
    return d;
}
// The same, but what follows from it is computed here: no register holds it from further above.
DEVICE int afresh(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
DEVICE float float_of_bits(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of_float(float x) { return __float_as_uint(x); }

// Two halves in one register, the first in the low bits.
DEVICE u32 add_halves(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
DEVICE u32 multiply_halves(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
DEVICE u32 multiply_add_halves(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// One of two halves in both places: no instruction of its own, the arithmetic on halves can take it so.
DEVICE u32 low_twice(u32 a) {
    u32 d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(d) : "r"(a));
    return d;
}
DEVICE u32 high_twice(u32 a) {
    u32 d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(d) : "r"(a));
    return d;
}
DEVICE u32 halves_of(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
DEVICE float float_of_half(u32 half) {
    float x;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(half));
    return x;
}

// Products are added with one rounding, and only where it is written so (the text is compiled without contraction):
// else kernels of other widths could round differently.
DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE float exp_of(float x) { return expf(x); }
// Zero for minus infinity, one for zero.
DEVICE float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float reciprocal_root(float x) { return rsqrtf(x); }
DEVICE float tanh_of(float x) { return tanhf(x); }

DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DEVICE void sync_threads() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }

// c += a * b, a [16, 16] and b [16, 8] halves, c [16, 8] f32. With g = lane / 4 and t = lane % 4 a lane has
// a: (g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..);  b: (2t.., g), (2t + 8.., g);
// c: (g, 2t..) and (g + 8, 2t..).
DEVICE void multiply_tile(float c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same with a [16, 8] and b [8, 8] floats of 8 bits of exponent and 11 of the number. a: (g, t), (g + 8, t),
// (g, t + 4), (g + 8, t + 4);  b: (t, g), (t + 4, g).
DEVICE void multiply_short_tile(float c[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(bits_of_float(a0)), "r"(bits_of_float(a1)), "r"(bits_of_float(a2)), "r"(bits_of_float(a3)),
          "r"(bits_of_float(b0)), "r"(bits_of_float(b1)));
}

// Four tiles of [8, 8] halves in shared memory; lane i has the address of row i % 8 of tile i / 8. Of tile n a lane gets
// columns 2t and 2t + 1 of row g in r[n].
DEVICE void load_tiles(u32 r[4], const void * row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((u32) __cvta_generic_to_shared(row))
                 : "memory");
}

// Four tiles of [8, 8] halves in shared memory, transposed; lane i has the address of row i % 8 of tile i / 8. Of tile n
// a lane gets rows 2t and 2t + 1 of column g in r[n].
DEVICE void load_transposed(u32 r[4], const void * row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((u32) __cvta_generic_to_shared(row))
                 : "memory");
}

// 16 bytes from global to shared memory while the thread goes on; the second form zeroes what lies behind `n` bytes.
DEVICE void copy_async(void * shared, const void * global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32) __cvta_generic_to_shared(shared)), "l"(global)
                 : "memory");
}
DEVICE void copy_async(void * shared, const void * global, int n) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32) __cvta_generic_to_shared(shared)),
                 "l"(global), "r"(n)
                 : "memory");
}
// The same of what is read once, from end to end: memory gives whole lines, whoever asks for the rest of one.
DEVICE void copy_line_async(void * shared, const void * global) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"((u32) __cvta_generic_to_shared(shared)),
                 "l"(global)
                 : "memory");
}
DEVICE void copy_float_async(void * shared, const void * global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((u32) __cvta_generic_to_shared(shared)), "l"(global)
                 : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Programmatic dependent launch: the next kernel of the stream may begin; the one before has ended.
DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Weights that are read once, here and now: the compiler may not put it off to where they are used.
DEVICE words4 load_weights(const u8 * at) {
    words4 w;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(at));
    return w;
}

DEVICE floats4 load_input(const float * at) {
    const float4 x = *(const float4 *) at;
    return {x.x, x.y, x.z, x.w};
}

DEVICE floats2 load_two(const float * at) {
    const float2 x = *(const float2 *) at;
    return {x.x, x.y};
}

DEVICE void store_output(float * at, floats4 x) { *(float4 *) at = make_float4(x.x, x.y, x.z, x.w); }

// Sums that other blocks read pass by the first-level cache.
DEVICE void store_shared_sum(floats4 * at, floats4 x) { __stcg((float4 *) at, make_float4(x.x, x.y, x.z, x.w)); }
DEVICE floats4 load_shared_sum(const floats4 * at) {
    const float4 x = __ldcg((const float4 *) at);
    return {x.x, x.y, x.z, x.w};
}
// One thread of a block, after all its threads have stored and met: whether it is the last of `n` blocks to come here.
// Then all that the others stored before can be loaded. The counter is zero again.
DEVICE bool is_last(u32 * counter, u32 n) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(n - 1) : "memory");
    return old == n - 1;
}

}  // namespace few_rows
