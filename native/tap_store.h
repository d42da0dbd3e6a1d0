#pragma once

#include <cstdint>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

// Context features of a target's last rows, on a device: f32 [n_features, n_rows]. Rows are
// numbered on and on, and row i lies in cell i modulo n_rows, until a later one takes its place.
// The target's own graph writes them, so that they come to the host only where somebody asks.
class tap_store {
  public:
    // n_batch: the most rows of one pass of the target. Throws backend_error without room.
    tap_store(ggml_backend_dev_t device, int n_features, int n_rows, int n_batch);

    ggml_tensor * states = nullptr;  // f32 [n_features, n_rows]
    ggml_tensor * cells = nullptr;   // i64 [n_batch]: where the rows of the pass in flight go

    int n_features() const { return static_cast<int>(states->ne[0]); }
    int n_rows() const { return static_cast<int>(states->ne[1]); }
    int32_t cell(int64_t row) const { return static_cast<int32_t>(row % n_rows()); }
    int64_t n_written() const { return n_written_; }
    size_t n_bytes() const { return ggml_backend_buffer_get_size(buffer_.get()); }

    // The next n rows: names their cells to the graph and returns the number of the first.
    int64_t begin(int n);

    // Throws std::invalid_argument for rows that were never written or lie there no more.
    void check(const std::vector<int64_t> & rows) const;

    // To out, [n, n_features].
    void read(const std::vector<int64_t> & rows, float * out) const;

  private:
    ggml_context_ptr tensors_;
    ggml_backend_buffer_ptr buffer_;
    int64_t n_written_ = 0;
};

}  // namespace dflash
