#pragma once

#include <initializer_list>
#include <map>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

// The inputs of a graph, adjacent on the device and on the host, so that one upload copies all of
// them. Those on the host keep their values from one upload to the next.
class input_pack {
  public:
    input_pack();

    // Call this before `place`.
    ggml_tensor * add(ggml_type type, std::initializer_list<int64_t> shape);

    // Takes the memory, filled with zeros. Throws backend_error if there is none.
    void place(ggml_backend_t backend);

    // An input's place on the host.
    template <typename T>
    T * host(const ggml_tensor * input) const {
        return reinterpret_cast<T *>(host_ + offsets_.at(input));
    }

    // The upload comes before anything that the backend is given later.
    void upload(ggml_backend_t backend) const;

  private:
    ggml_context_ptr tensors_;
    std::vector<ggml_tensor *> inputs_;
    std::map<const ggml_tensor *, size_t> offsets_;
    ggml_tensor * all_ = nullptr;  // i8, over all inputs
    char * host_ = nullptr;
    ggml_backend_buffer_ptr buffer_;
    ggml_backend_buffer_ptr host_buffer_;  // memory that the device reads directly
};

}  // namespace dflash
