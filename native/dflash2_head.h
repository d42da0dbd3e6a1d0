#pragma once

#include "draft_candidates.h"
#include "draft_head.h"
#include "host_results.h"

namespace dflash {

// DFlash 2: a selector scores each candidate of a position after each of the one before, by
// after[candidate] * (before[the one before] x gate), elementwise, where the gate follows from the
// position's state. The best step is taken from position to position. Probabilities are those among
// the candidates.
class dflash2_head : public draft_head {
  public:
    size_t n_nodes(int n_draft) const override;
    void build(const head_parts & parts) override;
    void read(ggml_backend_t backend, const std::vector<int32_t> & anchors,
              const draft_rows & out) override;

  private:
    draft_lattice lattice_of(int stream) const;

    int n_draft_ = 0;
    int n_streams_ = 0;
    int top_k_ = 0;         // candidates that are read
    int n_candidates_ = 0;  // candidates of the selector
    draft_candidates candidates_;
    ggml_tensor * first_ = nullptr;  // f32 [n_candidates, 1, n_streams]: after the anchor
    ggml_tensor * steps_ = nullptr;  // f32 [n_candidates, n_candidates, later rows]; may be null
    host_results results_;
};

}  // namespace dflash
