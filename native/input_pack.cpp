#include "input_pack.h"

#include <algorithm>
#include <string>

#include "errors.h"
#include "host_buffer.h"

namespace dflash {

namespace {

constexpr size_t most_inputs = 16;

}  // namespace

input_pack::input_pack()
    : tensors_(
          ggml_init({ggml_tensor_overhead() * (most_inputs + 1), nullptr, /*no_alloc=*/true})) {}

ggml_tensor * input_pack::add(ggml_type type, std::initializer_list<int64_t> shape) {
    ggml_tensor * input =
        ggml_new_tensor(tensors_.get(), type, static_cast<int>(shape.size()), shape.begin());
    inputs_.push_back(input);
    return input;
}

void input_pack::place(ggml_backend_t backend) {
    ggml_backend_dev_t device = ggml_backend_get_device(backend);
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    const size_t step = ggml_backend_buft_get_alignment(type);
    size_t n_bytes = 0;
    for (const ggml_tensor * input : inputs_) {
        offsets_[input] = n_bytes;
        n_bytes += (ggml_backend_buft_get_alloc_size(type, input) + step - 1) / step * step;
    }
    buffer_.reset(ggml_backend_buft_alloc_buffer(type, n_bytes));
    host_buffer_.reset(ggml_backend_buft_alloc_buffer(host_buffer_type(device), n_bytes));
    if (!buffer_ || !host_buffer_) {
        throw backend_error("no room for the inputs of the draft graph on " +
                            std::string(ggml_backend_name(backend)));
    }
    ggml_backend_buffer_clear(buffer_.get(), 0);
    char * base = static_cast<char *>(ggml_backend_buffer_get_base(buffer_.get()));
    for (ggml_tensor * input : inputs_) {
        ggml_backend_tensor_alloc(buffer_.get(), input, base + offsets_[input]);
    }
    all_ = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I8, static_cast<int64_t>(n_bytes));
    ggml_backend_tensor_alloc(buffer_.get(), all_, base);
    host_ = static_cast<char *>(ggml_backend_buffer_get_base(host_buffer_.get()));
    std::fill_n(host_, n_bytes, 0);
}

void input_pack::upload(ggml_backend_t backend) const {
    ggml_backend_tensor_set_async(backend, all_, host_, 0, ggml_nbytes(all_));
}

}  // namespace dflash
