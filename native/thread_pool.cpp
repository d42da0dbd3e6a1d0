#include "thread_pool.h"

#include <algorithm>
#include <string>

#include "backend.h"
#include "errors.h"
#include "ggml-cpu.h"

namespace dflash {
namespace {

// A function of the CPU's backend, which may be a library that llama.cpp loads at run time.
template <typename F>
F function(const char * name) {
    const ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    void * found = cpu == nullptr
                       ? nullptr
                       : ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), name);
    if (found == nullptr) {
        throw backend_error(std::string("this llama.cpp has no ") + name);
    }
    return reinterpret_cast<F>(found);
}

}  // namespace

thread_pool::thread_pool(int n_threads)
    : n_threads_(n_threads),
      n_used_(n_threads),
      free_(function<decltype(free_)>("ggml_threadpool_free")) {
    check_threads(n_threads);
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    pool_ = function<decltype(&ggml_threadpool_new)>("ggml_threadpool_new")(&params);
    if (pool_ == nullptr) {
        throw backend_error("cannot make " + std::to_string(n_threads) + " threads");
    }
}

thread_pool::~thread_pool() { free_(pool_); }

void thread_pool::attach(llama_context * ctx) const { llama_attach_threadpool(ctx, pool_, pool_); }

void thread_pool::use(int n) { n_used_ = std::clamp(n, 1, n_threads_); }

void thread_pool::attach(ggml_backend_t backend, int n_most) const {
    const ggml_backend_dev_t device = ggml_backend_get_device(backend);
    if (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        function<decltype(&ggml_backend_cpu_set_threadpool)>("ggml_backend_cpu_set_threadpool")(
            backend, pool_);
        set_n_threads(backend, std::min(n_used_, n_most));
    }
}

}  // namespace dflash
