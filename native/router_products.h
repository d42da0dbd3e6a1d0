#pragma once

#include "ggml.h"

namespace dflash {

// In the graph of a CPU, the products of routers, whose weights are f32 whatever the others are,
// are computed row by row, as llama.cpp computes those of a single row: its kernel for several f32
// rows rounds otherwise, and then another expert may be chosen. Leaves the graph as it is where the
// build of ggml does not let its kernel be called.
void multiply_routers_by_row(ggml_context * nodes, ggml_cgraph * graph);

}  // namespace dflash
