#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>

namespace dflash {

// Each maps to the Python class of the same noun in dflash_local.errors.

struct file_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct context_full_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct backend_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct not_finite_error : backend_error {
    using backend_error::backend_error;
};

[[noreturn]] inline void refuse_numbers() {
    throw backend_error(
        "the drafter's output is not a number; fetch its file again, or load without a drafter");
}

// Values that are not numbers cannot be sorted, and give no drafts.
inline void check_numbers(const float * values, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (std::isnan(values[i])) {
            refuse_numbers();
        }
    }
}

}  // namespace dflash
