#pragma once

#include <stdexcept>
#include <string>

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

}  // namespace dflash
