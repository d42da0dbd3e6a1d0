#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

// Results of a graph that the host reads as a whole. They are copied to memory that the device
// writes to directly.
class host_results {
  public:
    // Throws backend_error if the memory does not suffice.
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
    ggml_backend_buffer_ptr memory_;
    std::map<const ggml_tensor *, size_t> offsets_;
};

}  // namespace dflash
