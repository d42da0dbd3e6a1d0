#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

// Results of a graph that the host reads as a whole. They are copied to memory that the device
// writes to directly, those that have no memory yet in one copy.
class host_results {
  public:
    // Call this once, before the rest of the graph gets its memory. A result may be all of another
    // tensor, seen in another shape. Throws backend_error if the memory does not suffice.
    void place(ggml_backend_t backend, const std::vector<ggml_tensor *> & results);

    // Waits for the graph, then for the copies.
    void fetch(ggml_backend_t backend) const;

    // The values of a result, after `fetch`.
    template <typename T>
    const T * of(const ggml_tensor * result) const {
        const auto * base = static_cast<const char *>(ggml_backend_buffer_get_base(memory_.get()));
        return reinterpret_cast<const T *>(base + offsets_.at(result));
    }

  private:
    std::map<const ggml_tensor *, size_t> offsets_;
    ggml_backend_buffer_ptr memory_;
    std::vector<const ggml_tensor *> others_;  // that have memory of their own
    ggml_context_ptr tensors_;
    ggml_tensor * all_ = nullptr;  // i8, over all that are adjacent on the device
    ggml_backend_buffer_ptr device_memory_;
};

}  // namespace dflash
