// A mask that is moved equals one that is written anew.

#include <algorithm>
#include <cmath>
#include <random>

#include "draft_mask.h"
#include "tests.h"

namespace {

constexpr int n_kv = 37;
constexpr int n_rows = 3;

std::vector<float> as_floats(const std::vector<ggml_fp16_t> & cells) {
    std::vector<float> out(cells.size());
    std::transform(cells.begin(), cells.end(), out.begin(), ggml_fp16_to_fp32);
    return out;
}

void a_new_mask_hides_all() {
    std::vector<ggml_fp16_t> cells(n_kv * n_rows, ggml_fp32_to_fp16(1.0f));
    const dflash::draft_mask mask(cells.data(), n_kv, n_rows);
    check::equal(as_floats(cells), std::vector<float>(cells.size(), -INFINITY), "cells");
}

void moves_equal_a_mask_written_anew() {
    std::mt19937 random(3);
    std::uniform_int_distribution<int> bound(0, n_kv);
    std::vector<ggml_fp16_t> cells(n_kv * n_rows);
    dflash::draft_mask mask(cells.data(), n_kv, n_rows);
    std::vector<float> expected(cells.size(), -INFINITY);
    for (int i = 0; i < 5000; i++) {
        const int row = static_cast<int>(random() % n_rows);
        int first = bound(random);
        int end = bound(random);
        if (i % 7 != 0) {  // else as they come, empty ranges among them
            std::tie(first, end) = std::minmax({first, end});
        }
        mask.show(row, first, end);
        for (int cell = 0; cell < n_kv; cell++) {
            expected[row * n_kv + cell] = first <= cell && cell < end ? 0.0f : -INFINITY;
        }
        check::equal(as_floats(cells), expected,
                     "move " + std::to_string(i) + " to " + std::to_string(first) + " .. " +
                         std::to_string(end));
    }
}

}  // namespace

std::vector<check::test> mask_tests() {
    return {
        {"a new mask hides all", a_new_mask_hides_all},
        {"moves equal a mask written anew", moves_equal_a_mask_written_anew},
    };
}
