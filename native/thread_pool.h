#pragma once

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

namespace dflash {

// Threads that compute on the CPU and wait for the next graph awake, for some milliseconds. Without
// a pool ggml makes threads anew for each graph, which costs a small model a tenth of its speed,
// and most of it on a busy machine. A ggml that was built with OpenMP takes OpenMP's threads
// instead.
//
// One graph at a time: contexts and backends that share a pool belong to one thread.
class thread_pool {
  public:
    // Throws std::invalid_argument for a number of threads that ggml does not take, backend_error
    // where there are no more to be had.
    explicit thread_pool(int n_threads);
    ~thread_pool();

    thread_pool(const thread_pool &) = delete;
    thread_pool & operator=(const thread_pool &) = delete;

    int n_threads() const { return n_threads_; }

    // The pool must outlive what it is given to. A backend of another device than the CPU is left
    // as it is.
    void attach(llama_context * ctx) const;
    void attach(ggml_backend_t backend) const;

  private:
    int n_threads_;
    ggml_threadpool_t pool_ = nullptr;
};

}  // namespace dflash
