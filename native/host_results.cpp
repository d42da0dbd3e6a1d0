#include "host_results.h"

#include "errors.h"
#include "host_buffer.h"

namespace dflash {

namespace {

// The tensor that has the memory of this one; null if it has some already, or more than that.
ggml_tensor * root_of(ggml_tensor * result) {
    ggml_tensor * root = result->view_src != nullptr ? result->view_src : result;
    const bool is_whole = result->view_offs == 0 && ggml_nbytes(root) == ggml_nbytes(result);
    return root->data == nullptr && is_whole ? root : nullptr;
}

}  // namespace

void host_results::place(ggml_backend_t backend, const std::vector<ggml_tensor *> & results) {
    ggml_backend_dev_t device = ggml_backend_get_device(backend);
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    const size_t step = ggml_backend_buft_get_alignment(type);
    size_t n_bytes = 0;
    const auto add = [&](const ggml_tensor * result, size_t size) {
        offsets_[result] = n_bytes;
        n_bytes += (size + step - 1) / step * step;
    };
    std::vector<ggml_tensor *> adjacent;
    for (ggml_tensor * result : results) {
        if (result != nullptr && root_of(result) != nullptr) {
            adjacent.push_back(result);
            add(result, ggml_backend_buft_get_alloc_size(type, root_of(result)));
        }
    }
    const size_t n_adjacent = n_bytes;
    for (ggml_tensor * result : results) {
        if (result != nullptr && root_of(result) == nullptr) {
            others_.push_back(result);
            add(result, ggml_nbytes(result));
        }
    }
    if (n_bytes == 0) {
        return;
    }
    memory_.reset(ggml_backend_buft_alloc_buffer(host_buffer_type(device), n_bytes));
    if (n_adjacent > 0) {
        device_memory_.reset(ggml_backend_buft_alloc_buffer(type, n_adjacent));
    }
    if (!memory_ || (n_adjacent > 0 && !device_memory_)) {
        throw backend_error("no room for the output of the draft graph");
    }
    if (n_adjacent > 0) {
        ggml_backend_buffer_clear(device_memory_.get(), 0);
        auto * base = static_cast<char *>(ggml_backend_buffer_get_base(device_memory_.get()));
        for (ggml_tensor * result : adjacent) {
            ggml_backend_tensor_alloc(device_memory_.get(), root_of(result),
                                      base + offsets_[result]);
        }
        tensors_.reset(ggml_init({ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
        all_ = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I8, static_cast<int64_t>(n_adjacent));
        ggml_backend_tensor_alloc(device_memory_.get(), all_, base);
    }
}

void host_results::fetch(ggml_backend_t backend) const {
    auto * base =
        memory_ ? static_cast<char *>(ggml_backend_buffer_get_base(memory_.get())) : nullptr;
    if (all_ != nullptr) {
        ggml_backend_tensor_get_async(backend, all_, base, 0, ggml_nbytes(all_));
    }
    for (const ggml_tensor * result : others_) {
        ggml_backend_tensor_get_async(backend, result, base + offsets_.at(result), 0,
                                      ggml_nbytes(result));
    }
    ggml_backend_synchronize(backend);
}

}  // namespace dflash
