#pragma once

#include "few_rows_plan.h"

namespace dflash {

// Whether a plan by these rules takes this node of a graph: attention of few rows.
bool takes_attention(const ggml_tensor & node, const few_rows_rules & rules);

// How it is launched, with scratch of so many floats.
few_rows_plan::attention plan_attention(const ggml_tensor & node, const few_rows_rules & rules,
                                        size_t & scratch_floats);

// Gives the launch its scratch: `floats` as told by plan_attention, and `converted` for the product
// behind it.
few_rows::attention with_scratch(const few_rows_plan::attention & a, float * floats,
                                 unsigned char * converted);

}  // namespace dflash
