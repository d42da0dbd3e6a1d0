#include "draft_scratch.h"

#include <string>

#include "errors.h"

namespace dflash {

void draft_scratch::place_guarded(ggml_backend_t backend, int64_t n_gap,
                                  std::vector<ggml_tensor *> tensors) {
    for (ggml_tensor *& tensor : tensors) {
        tensor = tensor->view_src != nullptr ? tensor->view_src : tensor;
    }
    const size_t step = ggml_backend_buft_get_alignment(type_);
    size_t n_bytes = (n_gap * sizeof(float) + step - 1) / step * step;
    std::vector<size_t> offsets;
    for (const ggml_tensor * tensor : tensors) {
        offsets.push_back(n_bytes);
        n_bytes += (ggml_backend_buft_get_alloc_size(type_, tensor) + step - 1) / step * step;
    }
    ggml_backend_buffer_t memory = buffer(n_bytes);
    if (memory == nullptr) {
        throw backend_error("no room for the output of the draft graph on " +
                            std::string(ggml_backend_name(backend)));
    }
    char * base = static_cast<char *>(ggml_backend_buffer_get_base(memory));
    for (size_t i = 0; i < tensors.size(); i++) {
        ggml_backend_tensor_alloc(memory, tensors[i], base + offsets[i]);
    }
}

}  // namespace dflash
