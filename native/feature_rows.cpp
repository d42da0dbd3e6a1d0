#include "feature_rows.h"

#include <cstddef>
#include <cstring>

#include "errors.h"

namespace dflash {

feature_rows feature_rows::part(int begin, int end, int width) const {
    feature_rows rows;
    rows.n = end - begin;
    if (host != nullptr) {
        rows.host = host + static_cast<size_t>(begin) * width;
    } else if (!stored.empty()) {
        rows.stored.assign(stored.begin() + begin, stored.begin() + end);
    }
    return rows;
}

void feature_rows::check_finite(int width) const {
    const size_t n_values = static_cast<size_t>(n) * width;
    constexpr uint32_t exponent = 0x7f800000;
    bool finite = true;
    for (size_t i = 0; i < n_values; i++) {  // no early exit, so that compilers vectorise it
        uint32_t bits;
        std::memcpy(&bits, host + i, sizeof(bits));
        finite &= (bits & exponent) != exponent;
    }
    if (!finite) {
        throw backend_error(
            "hidden states of the target are not finite, nothing can be drafted from them; "
            "load without a drafter to see what the target puts out");
    }
}

}  // namespace dflash
