#pragma once

#include <cstdint>
#include <tuple>

namespace dflash {

constexpr int smallest_kv_step = 256;  // attention kernels prefer multiples of this
constexpr int smallest_rows = 8;       // row buckets are powers of two from here ...
constexpr int largest_rows = 512;      // ... to here; more rows go in several graphs
constexpr int largest_fused_rows = 64;

// The fixed sizes of one draft graph. Graphs of equal size are the same graph, so that backends
// which record graphs (CUDA) replay them.
struct draft_bucket {
    int n_streams;  // blocks: one for each of the first n_streams sequences; 0: inject only
    int n_rows;     // rows of features to inject; unused ones go to the spare cell
    int n_kv;       // cells that attention reads
    int n_draft;    // positions p+1 .. p+n_draft of each block that go through the head
    int top_k;
    bool stored;  // features come from the target's store, not from the host

    bool operator<(const draft_bucket & o) const { return key() < o.key(); }

  private:
    std::tuple<int, int, int, int, int, bool> key() const {
        return {n_streams, n_rows, n_kv, n_draft, top_k, stored};
    }
};

// KV lengths that graphs are made for. They are at most an eighth of the context apart. There are
// few of them, as each new graph costs more than a draft.
inline int kv_bucket(int64_t n) {
    int64_t step = smallest_kv_step;
    while (step * 16 <= n) {
        step *= 2;
    }
    return static_cast<int>((n + step - 1) / step * step);
}

inline int rows_bucket(int n) {
    int rows = smallest_rows;
    while (rows < n) {
        rows *= 2;
    }
    return rows;
}

}  // namespace dflash
