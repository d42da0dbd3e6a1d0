#pragma once

#include <string>

#include "ggml.h"

namespace dflash {

// From now on products with experts of MXFP4 in the host's memory run by `expert_tile` in this
// process, with whatever threads the CPU's backend has, unless llama.cpp has packed them for
// kernels of its own. gpt-oss has such experts, and where they do not fit a GPU they decide the
// speed. Where the kernels can't run, or are wrong, all stays as it was. No other thread may
// compute meanwhile: call it before this process's first model.
void speed_up_experts();

// The kernels in use: "AVX-512" or "AVX2", and empty if there are none.
std::string expert_kernels();

// Whether experts of this type are theirs, and the rows of a pass for each thread that they do in
// less time than it takes to copy the experts to a GPU; 0 if they are not.
int rows_a_thread(ggml_type type);

// Products done so.
long n_expert_products();

}  // namespace dflash
