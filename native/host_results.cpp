#include "host_results.h"

#include "errors.h"
#include "host_buffer.h"

namespace dflash {

namespace {

constexpr size_t alignment = 64;

}  // namespace

void host_results::place(ggml_backend_t backend, const std::vector<ggml_tensor *> & results) {
    size_t n_bytes = 0;
    for (const ggml_tensor * result : results) {
        if (result != nullptr) {
            offsets_[result] = n_bytes;
            n_bytes += (ggml_nbytes(result) + alignment - 1) / alignment * alignment;
        }
    }
    if (n_bytes == 0) {
        return;
    }
    memory_.reset(ggml_backend_buft_alloc_buffer(host_buffer_type(ggml_backend_get_device(backend)),
                                                 n_bytes));
    if (!memory_) {
        throw backend_error("no room on the host for the output of the draft graph");
    }
}

void host_results::fetch(ggml_backend_t backend) const {
    auto * base =
        memory_ ? static_cast<char *>(ggml_backend_buffer_get_base(memory_.get())) : nullptr;
    for (const auto & [result, offset] : offsets_) {
        ggml_backend_tensor_get_async(backend, result, base + offset, 0, ggml_nbytes(result));
    }
    ggml_backend_synchronize(backend);
}

}  // namespace dflash
