#pragma once

#include <vector>

#include "ggml.h"

namespace dflash {

// Which cells each row of a draft graph's blocks may look at, as attention needs it: f16
// [n_rows, n_kv], 0 or minus infinity. Each row looks at one range of positions. Only changes are
// written: from one draft to the next a range of thousands moves by a few positions.
class draft_mask {
  public:
    // Hides all cells from all rows. n_ring: position p is in cell p modulo n_ring.
    draft_mask(ggml_fp16_t * mask, int n_kv, int n_rows, int n_ring);

    // The row looks at positions first .. end-1, n_ring at most; their cells are below n_kv.
    void show(int row, int first, int end);

  private:
    struct range {
        int first = 0;
        int end = 0;
    };

    void fill(int row, int first, int end, float value);

    ggml_fp16_t * mask_;
    int n_kv_;
    int n_ring_;
    std::vector<range> shown_;
};

}  // namespace dflash
