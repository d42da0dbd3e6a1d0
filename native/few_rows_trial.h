#pragma once

#include <string>
#include <vector>

#include "few_rows.h"

namespace dflash {

// Products with matrices [rows, k] of random weights, by our kernels and by ggml's.
struct few_rows_trial {
    std::vector<int> columns;
    std::vector<double> ours_us, ggml_us;  // of one product with so many columns
    double error = 0.0;     // largest distance of a column of ours from f64, over its length
    bool same_bits = true;  // whether a column is the same beside any number of others
};

// On a device of ggml, by its name. Throws backend_error if our kernels do not run, or there is no
// room.
few_rows_trial try_few_rows(const std::string & device, few_rows_engine::cubins kernels,
                            ggml_type type, int64_t k, int64_t rows);

// Attention over caches of random keys and values, likewise; its error is the largest distance of a
// row's head.
few_rows_trial try_few_rows_attention(const std::string & device, few_rows_engine::cubins kernels,
                                      ggml_type keys, ggml_type values, int head_dim, int n_heads,
                                      int n_kv_heads);

// Products with experts, likewise: each row chooses some at random.
few_rows_trial try_few_rows_experts(const std::string & device, few_rows_engine::cubins kernels,
                                    ggml_type type, int64_t k, int64_t rows, int n_experts,
                                    int n_used);

}  // namespace dflash
