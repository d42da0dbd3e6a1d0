#pragma once

#include <memory>
#include <string>
#include <vector>

#include "few_rows.h"

namespace dflash {

// A GPU that our kernels may run on.
struct few_rows_gpu {
    std::string device;  // ggml's name of it
    std::string description;
    int architecture;  // 90 for compute capability 9.0
    int n_processors;
};
// Those of this process; `why_not` gets why there are none.
std::vector<few_rows_gpu> few_rows_gpus(std::string & why_not);

// The version of the driver as CUDA counts: 12040 for 12.4.
int few_rows_driver();

// The text of the kernels, as one source for NVRTC.
std::string few_rows_source();

// While it lives, the graphs of the CUDA backends that this thread opens run by `shared`; with
// `on_cpu`, those of CPU backends instead, for tests. A backend with which something is not as
// expected stays ggml's; `shared` then has the reason.
class few_rows_scope {
  public:
    explicit few_rows_scope(std::shared_ptr<few_rows_engine> shared, bool on_cpu = false);
    few_rows_scope(const few_rows_scope &) = delete;
    few_rows_scope & operator=(const few_rows_scope &) = delete;
    ~few_rows_scope();

    // What a thread's scopes say.
    struct state {
        std::shared_ptr<few_rows_engine> engine;
        bool on_cpu = false;
    };

  private:
    state before_;
};

// For a backend of ours that may be opened outside of a scope: where ggml records no graphs because
// we do, its graphs are recorded, too.
void record_graphs_of(ggml_backend_t backend);

}  // namespace dflash
