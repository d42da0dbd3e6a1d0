#pragma once

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

namespace dflash {

// Threads that compute on the CPU. After a graph they wait for the next one by polling for a few
// milliseconds. Without a pool ggml starts threads for each graph. That costs a small model a tenth
// of its speed, and on a busy machine most of it. A ggml that was built with OpenMP uses OpenMP's
// threads instead, which soon sleep at a barrier where ggml's spin (dflash_local/llama/runtime.py).
//
// One graph at a time: contexts and backends that share a pool belong to one thread.
class thread_pool {
  public:
    // Throws std::invalid_argument for a number of threads that ggml does not accept, backend_error
    // if the system gives no more threads.
    explicit thread_pool(int n_threads);
    ~thread_pool();

    thread_pool(const thread_pool &) = delete;
    thread_pool & operator=(const thread_pool &) = delete;

    int n_threads() const { return n_threads_; }

    // From now on so many of them compute for the backends that are attached, at least one. A
    // context is told by llama_set_n_threads.
    void use(int n);

    // The pool must outlive the context or backend. A backend that is not the CPU's is not changed.
    void attach(llama_context * ctx) const;
    // Before each graph, since `use` changes nothing else. With at most n_most threads.
    void attach(ggml_backend_t backend, int n_most) const;

  private:
    int n_threads_;
    int n_used_;
    void (*free_)(ggml_threadpool_t);
    ggml_threadpool_t pool_ = nullptr;
};

}  // namespace dflash
