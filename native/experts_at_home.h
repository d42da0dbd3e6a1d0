#pragma once

#include <cstdint>

#include "llama.h"

namespace dflash {

// Whether a model has experts in the host's memory.
bool has_experts_in_ram(const llama_model * model);

// From 32 rows on, ggml copies experts in RAM to a GPU, pass by pass, and computes them there. For
// a round, and for many a prompt, that takes longer than to read them once where they are: of
// gpt-oss-120b's shape with 2 layers' experts in RAM 32 rows took 356 ms beside an H200, and 50 on
// 16 cores. From the first call on, the devices of this process leave experts in RAM to the CPU in
// passes of up to `most_rows_at_home`; those that `speed_up_experts` is for with up to
// `rows_a_thread` for each of `n_threads`, where that is more. 512 rows took 172 ms with them, 517
// to 650 beside the H200, and would take as long as there with a third of the threads. False where
// devices are not laid out as expected: then nothing changes.
bool keep_experts_at_home(int n_threads);
constexpr int64_t most_rows_at_home = 128, rows_a_thread = 32;

// Products by experts that a device would have taken, so far.
long n_experts_kept();

}  // namespace dflash
