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
    const size_t begin = GGML_PAD(n_gap * sizeof(float), step);
    size_t n_bytes = begin;
    for (ggml_tensor *& tensor : tensors) {
        tensor = tensor->view_src != nullptr ? tensor->view_src : tensor;
        n_bytes += GGML_PAD(ggml_backend_buft_get_alloc_size(type_, tensor), step);
    }
    ggml_tallocr places = ggml_tallocr_new(grown(guarded_, n_bytes));
    places.offset += begin;
    for (ggml_tensor * tensor : tensors) {
        ggml_tallocr_alloc(&places, tensor);
    }
}

}  // namespace dflash
