#pragma once

#include <string>

#include "ggml.h"

namespace dflash {

// From now on products with experts of MXFP4 in RAM run by `expert_tile` in this process, with
// whatever threads the CPU's backend has: gpt-oss has such experts, and where they do not fit a GPU
// they decide the speed. Empty, or why they do not; then all is as before. No other thread may
// compute meanwhile, so call it before a process's first model of this kind is used.
std::string speed_up_experts();

// Whether they run, and for experts of this type.
bool speeds_up(ggml_type type);

// Products done so.
long n_expert_products();

// Ends it, for comparisons.
void leave_experts_to_ggml();

}  // namespace dflash
