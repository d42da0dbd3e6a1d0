#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

// Device memory for what a draft graph computes on the way. All graphs of a drafter share it, as
// one runs at a time. When a new graph makes it larger, those before it have lost theirs.
class draft_scratch {
  public:
    explicit draft_scratch(ggml_backend_t backend)
        : type_(ggml_backend_get_default_buffer_type(backend)),
          allocator_(ggml_gallocr_new(type_)) {}

    // Gives memory to all nodes of a graph that have none. False if there is no room.
    bool allocate(ggml_cgraph * graph) { return ggml_gallocr_alloc_graph(allocator_.get(), graph); }

    // A buffer of at least n_bytes beside that memory; null if there is no room.
    ggml_backend_buffer_t buffer(size_t n_bytes) {
        if (n_bytes > n_buffer_bytes()) {
            buffer_.reset();
            buffer_.reset(ggml_backend_buft_alloc_buffer(type_, n_bytes));
            if (buffer_) {
                ggml_backend_buffer_clear(buffer_.get(), 0);
            }
        }
        return buffer_.get();
    }

    // Puts tensors after memory for n_gap floats. On some backends the argmax of values that are
    // not numbers is -1; gathering then reads what is before a tensor, so that must be valid
    // memory. A tensor may be the first part of another one, which is then put there. Throws
    // backend_error if there is no room. One graph's tensors at a time.
    void place_guarded(ggml_backend_t backend, int64_t n_gap, std::vector<ggml_tensor *> tensors);

    size_t n_bytes() const {
        return n_buffer_bytes() + ggml_gallocr_get_buffer_size(allocator_.get(), 0);
    }

  private:
    size_t n_buffer_bytes() const {
        return buffer_ ? ggml_backend_buffer_get_size(buffer_.get()) : 0;
    }

    ggml_backend_buffer_type_t type_;
    ggml_gallocr_ptr allocator_;
    ggml_backend_buffer_ptr buffer_;
};

}  // namespace dflash
