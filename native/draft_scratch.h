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
        : backend_(backend),
          type_(ggml_backend_get_default_buffer_type(backend)),
          allocator_(ggml_gallocr_new(type_)) {}

    // Gives memory to all nodes of a graph that have none. False if there is no room.
    bool allocate(ggml_cgraph * graph) { return ggml_gallocr_alloc_graph(allocator_.get(), graph); }

    // Another buffer of at least n_bytes, for a head's own use. Throws backend_error if there is no
    // room.
    ggml_backend_buffer_t head_buffer(size_t n_bytes) { return grown(head_buffer_, n_bytes); }

    // Puts tensors after memory for n_gap floats. On some backends the argmax of values that are
    // not numbers is -1; gathering then reads what is before a tensor, so that must be valid
    // memory. A tensor may be the first part of another one, which is then put there. Throws
    // backend_error if there is no room. One graph's tensors at a time.
    void place_guarded(int64_t n_gap, std::vector<ggml_tensor *> tensors);

    size_t n_bytes() const {
        return size_of(guarded_) + size_of(head_buffer_) +
               ggml_gallocr_get_buffer_size(allocator_.get(), 0);
    }

  private:
    static size_t size_of(const ggml_backend_buffer_ptr & buffer) {
        return buffer ? ggml_backend_buffer_get_size(buffer.get()) : 0;
    }

    ggml_backend_buffer_t grown(ggml_backend_buffer_ptr & buffer, size_t n_bytes) const;

    ggml_backend_t backend_;
    ggml_backend_buffer_type_t type_;
    ggml_gallocr_ptr allocator_;
    ggml_backend_buffer_ptr guarded_;
    ggml_backend_buffer_ptr head_buffer_;
};

}  // namespace dflash
