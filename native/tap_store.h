#pragma once

#include <cstdint>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

// Context features of a target's last rows, on a device: f32 [n_features, n_rows]. Rows are
// numbered consecutively. Row i is in cell i modulo n_rows, until a later one overwrites it. The
// target's own graph writes them, so they come to the host only on request.
class tap_store {
  public:
    // n_batch: the most rows of one pass of the target. Throws backend_error if there is no room.
    tap_store(ggml_backend_dev_t device, int n_features, int n_rows, int n_batch);

    ggml_tensor * states = nullptr;  // f32 [n_features, n_rows]
    ggml_tensor * cells = nullptr;   // i64 [n_batch]: where the rows of the pass in flight go

    int n_features() const { return static_cast<int>(states->ne[0]); }
    int n_rows() const { return static_cast<int>(states->ne[1]); }
    int32_t cell(int64_t row) const { return static_cast<int32_t>(row % n_rows()); }
    int64_t n_written() const { return n_written_; }

    // Tells the graph the cells of the next n rows. Returns the number of the first row.
    int64_t begin(int n);

    // Throws std::invalid_argument for rows that were never written or are overwritten.
    void check(const std::vector<int64_t> & rows) const;

    // Reads rows to out, [n, n_features].
    void read(const std::vector<int64_t> & rows, float * out) const;

  private:
    ggml_context_ptr tensors_;
    ggml_backend_buffer_ptr buffer_;
    int64_t n_written_ = 0;
};

}  // namespace dflash
