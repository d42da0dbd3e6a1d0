#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

// A backend of our own on a device, for the drafter's graphs. n_threads only counts on the CPU.
// Throws std::invalid_argument for a number out of range, backend_error for a device that does not
// open.
ggml_backend_ptr open_draft_backend(ggml_backend_dev_t device, int n_threads);

// Changes nothing on other devices than the CPU.
void set_n_threads(ggml_backend_t backend, int n_threads);

// Whether it is ggml's CUDA backend, for choices between kernels that were measured with it.
bool is_cuda(ggml_backend_t backend);

}  // namespace dflash
