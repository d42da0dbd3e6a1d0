#pragma once

#include <vector>

#include "cuda/arguments.h"
#include "few_rows_kernel.h"
#include "private_abi.h"

namespace dflash {

// The graph again, as runs of nodes for ggml and launches of ours. The pointers to scratch memory
// in the launches are null.
struct few_rows_plan {
    struct segment {
        int begin, end;  // of `rest`
    };
    struct launch {
        bool converts = false;    // the input, before
        bool normalizes = false;  // and what that is made of, before
        few_rows::normalization input{};
        few_rows::product product{};
        few_rows_kernel kernel{};
        int row_blocks = 0, parts = 0, layers = 0;  // the grid
        std::vector<const ggml_tensor *> nodes;     // whose work it does
    };
    struct attention {
        few_rows::attention arguments{};
        few_rows_attention_kernel kernel{};
        int query_blocks = 0;   // of the grid
        bool converts = false;  // its result is the input of the launch behind it
        const ggml_tensor * node = nullptr;
    };
    struct experts {
        few_rows::expert_product arguments{};
        few_rows_kernel kernel{};
        few_rows::conversion input{};
        bool converts = false;  // the input, before
        few_rows::choice choice{};
        bool orders = false;                       // what was chosen, before
        int row_blocks = 0, parts = 0, items = 0;  // the grid
        std::vector<const ggml_tensor *> before;   // nodes that go into the launch, with the last:
        const ggml_tensor * node = nullptr;
    };
    struct plain {
        few_rows::plain_product arguments{};
        std::vector<const ggml_tensor *> nodes;  // one or two
    };
    struct step {
        enum { SEGMENT, LAUNCH, ATTENTION, EXPERTS, PLAIN } kind;
        int index;
    };

    std::vector<ggml_tensor *> rest;
    std::vector<segment> segments;
    std::vector<launch> launches;
    std::vector<attention> attentions;
    std::vector<experts> of_experts;
    std::vector<plain> plains;
    std::vector<step> steps;
    size_t converted_bytes = 0, partial_floats = 0, n_counters = 0, n_items = 0;
};

// A pure function of the graph: nothing is launched, and no memory that a tensor points to is read.
few_rows_plan plan_few_rows(const private_abi::graph & graph, const few_rows_rules & rules);

}  // namespace dflash
