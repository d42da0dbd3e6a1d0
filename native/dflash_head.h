#pragma once

#include "draft_head.h"
#include "draft_output.h"

namespace dflash {

// DFlash: positions do not depend on one another.
class dflash_head : public draft_head {
  public:
    size_t n_nodes(int n_draft) const override;
    void build(const head_parts & parts) override;
    void read(ggml_backend_t backend, const std::vector<int32_t> & anchors,
              const draft_rows & out) override;

  private:
    draft_output output_;
    int n_streams_ = 0;
};

}  // namespace dflash
