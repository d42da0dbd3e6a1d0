#pragma once

#include <cstddef>
#include <cstdint>

#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

// Matrices in bf16 take more memory than quantised ones, and a large GPU multiplies a few rows with
// them faster: the layers of an 8B drafter take an H200 577 microseconds instead of 738 for one
// block, and 656 instead of 1701 for eight. Other devices are slower with them.

// Whether it pays to have this matrix in bf16, for products with so many columns: the device has
// plenty of room, n_more bytes for all that would be changed with it, and both were timed on it.
bool pays_in_bf16(ggml_backend_t backend, ggml_type type, int64_t width, int64_t n_rows,
                  int64_t n_columns, size_t n_more);

// Whether matrices of this type and width can become bf16 on the device.
bool becomes_bf16(ggml_backend_t backend, ggml_type type, int64_t width);

// Writes rows of this type, which are in host memory, to those of `to` from row `first` on.
// to: bf16 [width, rows], on the device. Throws backend_error if there is no room.
void write_as_bf16(ggml_backend_t backend, ggml_type type, const void * rows, int64_t n_rows,
                   ggml_tensor * to, int64_t first);

// A copy of a matrix of the device, [width, rows] of any type, in memory of its own.
class bf16_copy {
  public:
    // Throws backend_error if there is no room.
    bf16_copy(ggml_backend_t backend, ggml_tensor * matrix);

    ggml_tensor * tensor = nullptr;

    size_t n_bytes() const { return ggml_backend_buffer_get_size(buffer_.get()); }

  private:
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr buffer_;
};

}  // namespace dflash
