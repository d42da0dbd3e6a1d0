#include "backend.h"

#include <algorithm>
#include <stdexcept>

#include "errors.h"
#include "few_rows_cuda.h"

namespace dflash {

void check_threads(int n) {
    if (n < 1 || n > GGML_MAX_N_THREADS) {
        throw std::invalid_argument("n_threads " + std::to_string(n) + " is not in 1 .. " +
                                    std::to_string(GGML_MAX_N_THREADS));
    }
}

ggml_backend_ptr open_backend(ggml_backend_dev_t device, int n_threads) {
    check_threads(n_threads);
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    if (!backend) {
        throw backend_error(std::string("cannot open ") + ggml_backend_dev_name(device) +
                            " for the drafter");
    }
    set_n_threads(backend.get(), n_threads);
    record_graphs_of(backend.get());
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

bool supports(ggml_backend_t backend, std::initializer_list<const ggml_tensor *> ops) {
    return std::all_of(ops.begin(), ops.end(), [&](const ggml_tensor * op) {
        return ggml_backend_supports_op(backend, op);
    });
}

void start_graph(ggml_backend_t backend, ggml_cgraph * graph, const char * what) {
    const ggml_status status = ggml_backend_graph_compute_async(backend, graph);
    if (status != GGML_STATUS_SUCCESS) {
        throw backend_error(std::string(ggml_backend_name(backend)) + " failed " + what + ": " +
                            ggml_status_to_string(status));
    }
}

void refuse_room(ggml_backend_t backend, const std::string & what) {
    throw backend_error("no room for " + what + " on " + ggml_backend_name(backend));
}

ggml_backend_buffer_type_t host_buffer_type(ggml_backend_dev_t device) {
    ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(device);
    return type != nullptr ? type
                           : ggml_backend_dev_buffer_type(
                                 ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
}

ggml_backend_dev_t device_of(ggml_backend_buffer_t buffer) {
    ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer));
    return device != nullptr ? device : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

ggml_context_ptr new_tensors(size_t n) {
    return ggml_context_ptr(ggml_init({ggml_tensor_overhead() * n, nullptr, /*no_alloc=*/true}));
}

ggml_context_ptr new_nodes(size_t n) {
    return ggml_context_ptr(
        ggml_init({ggml_tensor_overhead() * n + ggml_graph_overhead_custom(n, false), nullptr,
                   /*no_alloc=*/true}));
}

}  // namespace dflash
