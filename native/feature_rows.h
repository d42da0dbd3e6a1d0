#pragma once

#include <cstdint>
#include <vector>

namespace dflash {

// Context features, n rows of n_taps * n_embd: either on the host, row by row, or in the target's
// store, given by their numbers there.
struct feature_rows {
    int n = 0;
    const float * host = nullptr;
    std::vector<int64_t> stored = {};

    feature_rows part(int begin, int end, int width) const;

    // For rows on the host. Throws backend_error if they are not finite. They would stay in the
    // cells, and a masked weight of 0 times NaN is NaN, so later drafts would be spoilt, too.
    void check_finite(int width) const;
};

}  // namespace dflash
