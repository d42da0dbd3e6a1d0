#include "draft_scratch.h"

#include "backend.h"

namespace dflash {

ggml_backend_buffer_t draft_scratch::grown(ggml_backend_buffer_ptr & buffer, size_t n_bytes) const {
    if (n_bytes > size_of(buffer)) {
        buffer.reset();
        buffer.reset(ggml_backend_buft_alloc_buffer(type_, n_bytes));
        if (!buffer) {
            refuse_room(backend_, "the output of the draft graph");
        }
        ggml_backend_buffer_clear(buffer.get(), 0);
    }
    return buffer.get();
}

void draft_scratch::place_guarded(int64_t n_gap, std::vector<ggml_tensor *> tensors) {
    const size_t step = ggml_backend_buft_get_alignment(type_);
    size_t n_bytes = GGML_PAD(n_gap * sizeof(float), step);
    std::vector<size_t> offsets;
    for (ggml_tensor *& tensor : tensors) {
        tensor = tensor->view_src != nullptr ? tensor->view_src : tensor;
        offsets.push_back(n_bytes);
        n_bytes += GGML_PAD(ggml_backend_buft_get_alloc_size(type_, tensor), step);
    }
    ggml_backend_buffer_t memory = grown(guarded_, n_bytes);
    char * base = static_cast<char *>(ggml_backend_buffer_get_base(memory));
    for (size_t i = 0; i < tensors.size(); i++) {
        ggml_backend_tensor_alloc(memory, tensors[i], base + offsets[i]);
    }
}

}  // namespace dflash
