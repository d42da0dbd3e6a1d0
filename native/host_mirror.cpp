#include "host_mirror.h"

#include <algorithm>
#include <string>

#include "backend.h"
#include "ggml-alloc.h"

namespace dflash {

namespace {

constexpr size_t most_inputs = 16;

}  // namespace

host_mirror::host_mirror() : context_(new_tensors(most_inputs + 1)) {}

ggml_tensor * host_mirror::add(ggml_type type, std::initializer_list<int64_t> shape) {
    ggml_tensor * input =
        ggml_new_tensor(context_.get(), type, static_cast<int>(shape.size()), shape.begin());
    tensors_.push_back(input);
    return input;
}

void host_mirror::place(ggml_backend_t backend) { place(backend, "inputs"); }

void host_mirror::place(ggml_backend_t backend, ggml_cgraph * graph,
                        const std::vector<ggml_tensor *> & results) {
    for (ggml_tensor * result : results) {
        if (result != nullptr) {
            ggml_set_output(result);
            ggml_build_forward_expand(graph, result);
            tensors_.push_back(root(result));
        }
    }
    if (!tensors_.empty()) {
        place(backend, "output");
    }
}

void host_mirror::place(ggml_backend_t backend, const char * what) {
    ggml_backend_dev_t device = ggml_backend_get_device(backend);
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    const size_t step = ggml_backend_buft_get_alignment(type);
    size_t n_bytes = 0;
    for (const ggml_tensor * tensor : tensors_) {
        n_bytes += GGML_PAD(ggml_backend_buft_get_alloc_size(type, tensor), step);
    }
    buffer_.reset(ggml_backend_buft_alloc_buffer(type, n_bytes));
    host_buffer_.reset(ggml_backend_buft_alloc_buffer(host_buffer_type(device), n_bytes));
    if (!buffer_ || !host_buffer_) {
        refuse_room(backend, std::string("the ") + what + " of the draft graph");
    }
    ggml_backend_buffer_clear(buffer_.get(), 0);
    ggml_tallocr places = ggml_tallocr_new(buffer_.get());
    for (ggml_tensor * tensor : tensors_) {
        ggml_tallocr_alloc(&places, tensor);
    }
    all_ = ggml_new_tensor_1d(context_.get(), GGML_TYPE_I8, static_cast<int64_t>(n_bytes));
    ggml_backend_tensor_alloc(buffer_.get(), all_, ggml_backend_buffer_get_base(buffer_.get()));
    host_ = static_cast<char *>(ggml_backend_buffer_get_base(host_buffer_.get()));
    std::fill_n(host_, n_bytes, 0);
}

void host_mirror::upload(ggml_backend_t backend) const {
    ggml_backend_tensor_set_async(backend, all_, host_, 0, ggml_nbytes(all_));
}

void host_mirror::fetch(ggml_backend_t backend) const {
    if (all_ != nullptr) {
        ggml_backend_tensor_get_async(backend, all_, host_, 0, ggml_nbytes(all_));
    }
    ggml_backend_synchronize(backend);
}

}  // namespace dflash
