#pragma once

#include <initializer_list>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

// Inputs of a graph, or results that the host reads as a whole. They are adjacent on the device and
// in host memory that it reads and writes directly, so that one copy takes all of them.
class host_mirror {
  public:
    host_mirror();

    // A new input. It keeps its value on the host from one upload to the next.
    ggml_tensor * add(ggml_type type, std::initializer_list<int64_t> shape);

    // Allocates all inputs, filled with zeros. Throws backend_error if there is no room.
    void place(ggml_backend_t backend);

    // Makes these the last nodes of a graph that is not allocated yet, and allocates them. Some may
    // be null. Throws backend_error if there is no room.
    void place(ggml_backend_t backend, ggml_cgraph * graph,
               const std::vector<ggml_tensor *> & results);

    // The upload comes before anything that the backend is given later.
    void upload(ggml_backend_t backend) const;

    // Waits for the graph, then for the copy.
    void fetch(ggml_backend_t backend) const;

    // The place of an input or a result on the host.
    template <typename T>
    T * of(const ggml_tensor * tensor) const {
        const auto offset =
            static_cast<char *>(root(tensor)->data) - static_cast<char *>(all_->data);
        return reinterpret_cast<T *>(host_ + offset + tensor->view_offs);
    }

  private:
    // The tensor whose memory it has: a result may be a view.
    template <typename Tensor>
    static Tensor * root(Tensor * tensor) {
        return tensor->view_src != nullptr ? tensor->view_src : tensor;
    }

    void place(ggml_backend_t backend, const char * what);

    ggml_context_ptr context_;
    std::vector<ggml_tensor *> tensors_;
    ggml_tensor * all_ = nullptr;  // i8, over all of them
    char * host_ = nullptr;
    ggml_backend_buffer_ptr buffer_;
    ggml_backend_buffer_ptr host_buffer_;
};

}  // namespace dflash
