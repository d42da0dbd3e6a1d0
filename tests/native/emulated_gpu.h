// The instructions of native/cuda/primitives.cuh on a CPU, so that tests run the kernels' own text
// without a GPU. Every thread of a block is a fiber; it gives way where threads wait for each
// other. Copies are made at once, so a missing wait is not found here: compute-sanitizer does that
// on a GPU.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#include "../../native/cuda/arguments.h"

namespace few_rows {

constexpr int MOST_BLOCKS = 2;

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;

struct alignas(8) words2 {
    u32 x, y;
};
struct alignas(16) words4 {
    u32 x, y, z, w;
};
struct alignas(8) floats2 {
    float x, y;
};
struct alignas(16) floats4 {
    float x, y, z, w;
};

}  // namespace few_rows

namespace emulated {

using few_rows::words4;

struct dim {
    int x = 1, y = 1, z = 1;
};

// What the lanes of a warp show each other in one instruction.
struct exchange {
    float values[32];
    unsigned a[32][4], b[32][2];
    const unsigned short * rows[32];
};

// What runs on a stack of its own, until it gives way to another one. One without a size is the
// test itself, on the process's stack.
class fiber {
  public:
    explicit fiber(size_t stack_size = 0) : stack_(stack_size) {
        if (stack_size != 0) {
            bottom_ = stack_.data();
            size_ = stack_size;
            getcontext(&context_);
            context_.uc_stack.ss_sp = stack_.data();
            context_.uc_stack.ss_size = stack_.size();
            context_.uc_link = nullptr;
            makecontext(&context_, run_threads, 0);
        }
    }

    void give_way_to(fiber & next) {
        last() = this;
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_start_switch_fiber(&fake_, next.bottom_, next.size_);
#endif
        swapcontext(&context_, &next.context_);
        arrived(fake_);
    }

  private:
    static void run_threads();
    static fiber *& last() {
        static fiber * one = nullptr;
        return one;
    }
    static void arrived([[maybe_unused]] void * fake) {
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(fake, &last()->bottom_, &last()->size_);
#endif
    }

    std::vector<char> stack_;
    ucontext_t context_ = {};
    void * fake_ = nullptr;
    const void * bottom_ = nullptr;
    size_t size_ = 0;
};

// The block that runs now.
struct block {
    enum state { RUNS, AT_BARRIER, DONE };

    dim grid, index;
    int thread = 0;
    const std::function<void()> * kernel = nullptr;
    std::vector<words4> shared;
    fiber test;
    std::vector<std::unique_ptr<fiber>> fibers;
    std::vector<state> states;        // of each thread
    std::vector<exchange> exchanges;  // two for each warp, in turn
    std::vector<int> turns;           // of each thread

    // The lanes of a warp take turns until they have ended or wait for the other warps; then the
    // next warp runs. When none does, it is the test's turn.
    void give_way(fiber & from) {
        const int n = static_cast<int>(states.size()), warp = thread / 32 * 32;
        for (int i = 1; i <= 32; i++) {
            const int lane = warp + (thread - warp + i) % 32;
            if (states[lane] == RUNS) {
                return give_way(from, lane);
            }
        }
        for (int lane = warp + 32; lane < n; lane++) {
            if (states[lane] == RUNS) {
                return give_way(from, lane);
            }
        }
        from.give_way_to(test);
    }
    void give_way(fiber & from, int to) {
        thread = to;
        if (&from != fibers[to].get()) {
            from.give_way_to(*fibers[to]);
        }
    }
    void give_way() { give_way(*fibers[thread]); }
};
inline block & current() {
    static block now;
    return now;
}

// Each thread of one block after the other.
inline void fiber::run_threads() {
    arrived(nullptr);
    block & b = current();
    for (;;) {
        (*b.kernel)();
        b.states[b.thread] = block::DONE;
        b.give_way();
    }
}

// The exchange of this instruction, once all lanes of the warp have filled in their part.
template <typename Fill>
exchange & exchanged(const Fill & fill) {
    block & b = current();
    const int thread = b.thread;
    exchange & e = b.exchanges[thread / 32 * 2 + b.turns[thread]++ % 2];
    fill(e, thread % 32);
    b.give_way();
    return e;
}

// Runs `kernel` for each block of the grid, the last blocks first: nothing may depend on their
// order.
inline void launch(dim grid, int threads, size_t shared_bytes,
                   const std::function<void()> & kernel) {
    block & b = current();
    b.grid = grid;
    b.kernel = &kernel;
    while (static_cast<int>(b.fibers.size()) < threads) {
        b.fibers.push_back(std::make_unique<fiber>(64 << 10));
    }
    b.exchanges.resize(threads / 32 * 2);
    for (int z = grid.z; z-- > 0;) {
        for (int y = grid.y; y-- > 0;) {
            for (int x = grid.x; x-- > 0;) {
                b.index = {x, y, z};
                b.shared.assign(shared_bytes / sizeof(words4), {~0u, ~0u, ~0u, ~0u});
                b.turns.assign(threads, 0);
                b.states.assign(threads, block::RUNS);
                for (auto next = b.states.begin(); next != b.states.end();) {
                    b.give_way(b.test, static_cast<int>(next - b.states.begin()));
                    std::replace(b.states.begin(), b.states.end(), block::AT_BARRIER, block::RUNS);
                    next = std::find(b.states.begin(), b.states.end(), block::RUNS);
                }
            }
        }
    }
}

inline float to_float(unsigned half) {
    const auto bits = static_cast<unsigned short>(half);
    _Float16 x;
    std::memcpy(&x, &bits, 2);
    return static_cast<float>(x);
}
// Rounded once: a double holds any sum or product of halves.
inline unsigned to_half(double x) {
    const auto h = static_cast<_Float16>(x);
    unsigned short bits;
    std::memcpy(&bits, &h, 2);
    return bits;
}
template <typename Each>
unsigned of_each_half(const Each & each) {
    return to_half(each(0)) | to_half(each(16)) << 16;
}

}  // namespace emulated

#define INLINE inline
#define DEVICE static inline
#define KERNEL(name, parameters, threads, blocks) \
    [[maybe_unused]] static void name(const parameters & arguments)

namespace few_rows {

inline int thread_index() { return emulated::current().thread; }
inline int block_x() { return emulated::current().index.x; }
inline int block_y() { return emulated::current().index.y; }
inline int block_z() { return emulated::current().index.z; }
inline int grid_x() { return emulated::current().grid.x; }
inline int grid_y() { return emulated::current().grid.y; }
inline int grid_z() { return emulated::current().grid.z; }

inline u8 * shared_memory() { return reinterpret_cast<u8 *>(emulated::current().shared.data()); }

inline u32 shift_right(u32 low, u32 high, u32 shift) {
    return static_cast<u32>((static_cast<u64>(high) << 32 | low) >> (shift & 31));
}
// As CUDA's intrinsic, which looks at three bits of the selector for each byte.
inline u32 pick_bytes(u32 a, u32 b, u32 selector) {
    const u64 bytes = static_cast<u64>(b) << 32 | a;
    u32 picked = 0;
    for (int i = 0; i < 4; i++) {
        picked |= static_cast<u32>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    }
    return picked;
}
template <u32 MASK, u32 OTHER>
u32 mask_or(u32 a) {
    return (a & MASK) | OTHER;
}
inline int afresh(int x) { return x; }
inline float float_of_bits(u32 bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline u32 bits_of_float(float x) {
    u32 bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline u32 add_halves(u32 a, u32 b) {
    return emulated::of_each_half([=](int at) {
        return static_cast<double>(emulated::to_float(a >> at)) + emulated::to_float(b >> at);
    });
}
inline u32 multiply_halves(u32 a, u32 b) {
    return emulated::of_each_half([=](int at) {
        return static_cast<double>(emulated::to_float(a >> at)) * emulated::to_float(b >> at);
    });
}
inline u32 multiply_add_halves(u32 a, u32 b, u32 c) {
    return emulated::of_each_half([=](int at) {
        return static_cast<double>(emulated::to_float(a >> at)) * emulated::to_float(b >> at) +
               emulated::to_float(c >> at);
    });
}
inline u32 low_twice(u32 a) { return (a & 0xffff) * 0x10001; }
inline u32 high_twice(u32 a) { return (a >> 16) * 0x10001; }
inline u32 halves_of(float low, float high) {
    return emulated::to_half(low) | emulated::to_half(high) << 16;
}
inline float float_of_half(u32 half) { return emulated::to_float(half); }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline float larger(float a, float b) { return std::fmax(a, b); }
inline float exp_of(float x) { return std::exp(x); }
inline float exp2_of(float x) { return std::exp2(x); }
inline float reciprocal_root(float x) { return 1.0f / std::sqrt(x); }
inline float tanh_of(float x) { return std::tanh(x); }

inline float shuffle_xor(float x, int mask) {
    const int lane = thread_index() % 32;
    return emulated::exchanged([=](emulated::exchange & e, int at) { e.values[at] = x; })
        .values[lane ^ mask];
}
inline void sync_threads() {
    emulated::block & b = emulated::current();
    b.states[b.thread] = emulated::block::AT_BARRIER;
    b.give_way();
}

inline void sync_warp() {
    emulated::exchanged([](emulated::exchange &, int) {});
}

inline void multiply_tile(float c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
    const emulated::exchange & e = emulated::exchanged([&](emulated::exchange & of, int at) {
        const u32 a[4] = {a0, a1, a2, a3};
        std::memcpy(of.a[at], a, sizeof(a));
        of.b[at][0] = b0;
        of.b[at][1] = b1;
    });
    for (int i = 0; i < 4; i++) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        float sum = 0.0f;
        for (int k = 0; k < 16; k++) {
            const u32 a = e.a[row % 8 * 4 + k % 8 / 2][k / 8 * 2 + row / 8];
            const u32 b = e.b[column * 4 + k % 8 / 2][k / 8];
            sum += emulated::to_float(a >> k % 2 * 16) * emulated::to_float(b >> k % 2 * 16);
        }
        c[i] += sum;
    }
}

inline void multiply_short_tile(float c[4], float a0, float a1, float a2, float a3, float b0,
                                float b1) {
    const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
    const emulated::exchange & e = emulated::exchanged([&](emulated::exchange & of, int at) {
        const float a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
        std::memcpy(of.a[at], a, sizeof(a));
        std::memcpy(of.b[at], b, sizeof(b));
    });
    // The last 13 bits of an f32 are not read.
    const auto read = [](u32 bits) { return float_of_bits(bits & ~0x1fffu); };
    for (int i = 0; i < 4; i++) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        float sum = 0.0f;
        for (int k = 0; k < 8; k++) {
            sum += read(e.a[row % 8 * 4 + k % 4][k / 4 * 2 + row / 8]) *
                   read(e.b[column * 4 + k % 4][k / 4]);
        }
        c[i] += sum;
    }
}

inline void load_tiles(u32 r[4], const void * row) {
    const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
    const emulated::exchange & e = emulated::exchanged([&](emulated::exchange & of, int at) {
        of.rows[at] = static_cast<const unsigned short *>(row);
    });
    for (int n = 0; n < 4; n++) {
        std::memcpy(&r[n], e.rows[n * 8 + g] + 2 * t, 4);
    }
}

inline void load_transposed(u32 r[4], const void * row) {
    const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
    const emulated::exchange & e = emulated::exchanged([&](emulated::exchange & of, int at) {
        of.rows[at] = static_cast<const unsigned short *>(row);
    });
    for (int n = 0; n < 4; n++) {
        r[n] = e.rows[n * 8 + 2 * t][g] | static_cast<u32>(e.rows[n * 8 + 2 * t + 1][g]) << 16;
    }
}

inline void copy_async(void * shared, const void * global) { std::memcpy(shared, global, 16); }
inline void copy_async(void * shared, const void * global, int n) {
    std::memcpy(shared, global, n);
    std::memset(static_cast<char *>(shared) + n, 0, 16 - n);
}
inline void copy_line_async(void * shared, const void * global) { copy_async(shared, global); }
inline void copy_float_async(void * shared, const void * global) { std::memcpy(shared, global, 4); }
inline void copy_commit() {}
template <int N>
void copy_wait() {}
inline void let_next_begin() {}
inline void wait_for_previous() {}

inline words4 load_weights(const u8 * at) { return *reinterpret_cast<const words4 *>(at); }
inline floats4 load_input(const float * at) { return *reinterpret_cast<const floats4 *>(at); }
inline floats2 load_two(const float * at) { return *reinterpret_cast<const floats2 *>(at); }
inline void store_output(float * at, floats4 x) { *reinterpret_cast<floats4 *>(at) = x; }
inline void store_shared_sum(floats4 * at, floats4 x) { *at = x; }
inline floats4 load_shared_sum(const floats4 * at) { return *at; }
inline bool is_last(u32 * counter, u32 n) {
    const u32 old = *counter;
    *counter = old >= n - 1 ? 0 : old + 1;
    return old == n - 1;
}

}  // namespace few_rows
