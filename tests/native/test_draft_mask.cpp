// A mask that is moved equals one that is written anew.

#include <algorithm>
#include <cmath>
#include <random>

#include "check.h"
#include "draft_mask.h"

namespace {

constexpr int n_kv = 37;
constexpr int n_ring = 36;
constexpr int n_rows = 3;

std::vector<float> as_floats(const std::vector<ggml_fp16_t> & cells) {
    std::vector<float> out(cells.size());
    std::transform(cells.begin(), cells.end(), out.begin(), ggml_fp16_to_fp32);
    return out;
}

void a_new_mask_hides_all() {
    std::vector<ggml_fp16_t> cells(n_kv * n_rows, ggml_fp32_to_fp16(1.0f));
    const dflash::draft_mask mask(cells.data(), n_kv, n_rows, n_ring);
    check::equal(as_floats(cells), std::vector<float>(cells.size(), -INFINITY), "cells");
}

void moves_equal_a_mask_written_anew() {
    std::mt19937 random(3);
    std::uniform_int_distribution<int> bound(0, 5 * n_ring);
    std::uniform_int_distribution<int> length(-3, n_ring);  // empty ranges among them
    std::uniform_int_distribution<int> step(-2, 6);
    std::vector<ggml_fp16_t> cells(n_kv * n_rows);
    dflash::draft_mask mask(cells.data(), n_kv, n_rows, n_ring);
    std::vector<float> expected(cells.size(), -INFINITY);
    std::vector<int> ends(n_rows, 0);
    for (int i = 0; i < 5000; i++) {
        const int row = static_cast<int>(random() % n_rows);
        // Mostly on by a little, as drafts go, and round the ring many times.
        const int end = std::max(0, i % 7 == 0 ? bound(random) : ends[row] + step(random));
        const int first = std::max(0, end - length(random));
        ends[row] = end;
        mask.show(row, first, end);
        std::fill_n(expected.begin() + row * n_kv, n_kv, -INFINITY);
        for (int position = first; position < end; position++) {
            expected[row * n_kv + position % n_ring] = 0.0f;
        }
        check::equal(as_floats(cells), expected,
                     "move " + std::to_string(i) + " to " + std::to_string(first) + " .. " +
                         std::to_string(end));
    }
}

const check::tests registered{
    {"a new mask hides all", a_new_mask_hides_all},
    {"moves equal a mask written anew", moves_equal_a_mask_written_anew},
};

}  // namespace
