#pragma once

#include <memory>

#include "few_rows.h"

namespace dflash {

// What the kernels compute, by ggml's own operations on the CPU and so with its very bits: for
// tests of all that is around the kernels.
std::unique_ptr<few_rows_executor> few_rows_on_cpu();

}  // namespace dflash
