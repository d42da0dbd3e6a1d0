#include "draft_backend.h"

#include <stdexcept>
#include <string>

#include "errors.h"

namespace dflash {

namespace {

constexpr int most_threads = 512;  // as llama.cpp

}  // namespace

ggml_backend_ptr open_draft_backend(ggml_backend_dev_t device, int n_threads) {
    if (n_threads < 1 || n_threads > most_threads) {
        throw std::invalid_argument("n_threads " + std::to_string(n_threads) + " is not in 1 .. " +
                                    std::to_string(most_threads));
    }
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    if (!backend) {
        throw backend_error(std::string("cannot open ") + ggml_backend_dev_name(device) +
                            " for the drafter");
    }
    set_n_threads(backend.get(), n_threads);
    return backend;
}

void set_n_threads(ggml_backend_t backend, int n_threads) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    const auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
    if (set != nullptr) {
        set(backend, n_threads);
    }
}

bool is_cuda(ggml_backend_t backend) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    return std::string(ggml_backend_reg_name(reg)) == "CUDA";
}

}  // namespace dflash
