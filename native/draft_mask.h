#pragma once

#include <vector>

#include "ggml.h"

namespace dflash {

// Which cells each row of a draft graph's blocks may look at, as attention takes it: f16
// [n_rows, n_kv], 0 or minus infinity. Each row looks at one range of cells, and only what changes
// is written: a range of thousands moves by a few from one draft to the next.
class draft_mask {
  public:
    // Hides all cells of all rows.
    draft_mask(ggml_fp16_t * mask, int n_kv, int n_rows);

    // The row looks at cells first .. end-1.
    void show(int row, int first, int end);

  private:
    struct range {
        int first = 0;
        int end = 0;
    };

    ggml_fp16_t * mask_;
    int n_kv_;
    std::vector<range> shown_;
};

}  // namespace dflash
