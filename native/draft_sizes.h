#pragma once

#include <cstdint>

#include "ggml-backend.h"

namespace dflash {

// The sizes that draft graphs are made for. There are few of them: to make a graph takes as long as
// one to three drafts, and a GPU's recording of it as long again.
class draft_sizes {
  public:
    // Rows of context in a graph are powers of two, from a least number up; more than these go
    // in several graphs.
    static constexpr int most_rows = 512;

    // On the host each row takes its time. A GPU computes some more for nothing.
    draft_sizes(ggml_backend_dev_t device, int least_on_host, int least_on_gpu);

    // Cells that attention reads, n of them in use: at most an eighth of the context apart, or one
    // step.
    int cells(int64_t n) const;
    // Rows to inject, for n of them.
    int rows(int n) const;

  private:
    int64_t least_step_;
    int least_rows_;
};

}  // namespace dflash
