#pragma once

#include "few_rows_plan.h"

namespace dflash {

// Whether a plan by these rules takes this node of a graph: a product of few rows with the experts
// that they chose.
bool takes_experts(const ggml_tensor & node, const few_rows_rules & rules);

// How it is launched.
few_rows_plan::experts plan_experts(const ggml_tensor & node, const few_rows_rules & rules);

// A product with experts and its bias, or null: what an activation takes as gate or as `up`.
struct expert_chain {
    const ggml_tensor * product = nullptr;
    const ggml_tensor * bias = nullptr;  // a node
};

// Whether gate and `up` may share a launch with their activation.
bool may_share(const expert_chain & gate, const expert_chain & up, const ggml_tensor & activation,
               const few_rows_rules & rules);
few_rows_plan::experts plan_experts(const expert_chain & gate, const expert_chain & up,
                                    const ggml_tensor & activation, const few_rows_rules & rules);

// Whether a product takes its bias along.
bool takes_bias(const expert_chain & c, const few_rows_rules & rules);
few_rows_plan::experts plan_experts(const expert_chain & c, const few_rows_rules & rules);

// Whether there is a kernel for an F32 matrix, such as a router, and for a product with it.
bool is_readable_plain(const ggml_tensor & weight, const few_rows_rules & rules);
bool takes_plain(const ggml_tensor & node, const few_rows_rules & rules);
void add_plain(few_rows_plan::plain & made, const ggml_tensor & node);

}  // namespace dflash
