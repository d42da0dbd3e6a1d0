#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

// A backend of our own on a device, for the drafter's graphs. n_threads only counts on the CPU.
// Throws std::invalid_argument for a number out of range, backend_error for a device that does not
// open.
ggml_backend_ptr open_draft_backend(ggml_backend_dev_t device, int n_threads);

}  // namespace dflash
