#include "draft_sizes.h"

namespace dflash {

namespace {

// Attention kernels prefer multiples of 256. On an H200, a drafter's graph of the 30B-A3B shape
// took 3 to 6 ms to make, and one for each 256 cells and 8 rows was a tenth of an answer's time; to
// read 1024 cells instead takes some microseconds.
constexpr int64_t step_on_host = 256, step_on_gpu = 1024;

bool is_host(ggml_backend_dev_t device) {
    return ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

}  // namespace

draft_sizes::draft_sizes(ggml_backend_dev_t device, int least_on_host, int least_on_gpu)
    : least_step_(is_host(device) ? step_on_host : step_on_gpu),
      least_rows_(is_host(device) ? least_on_host : least_on_gpu) {}

int draft_sizes::cells(int64_t n) const {
    int64_t step = least_step_;
    while (step * 16 <= n) {
        step *= 2;
    }
    return static_cast<int>((n + step - 1) / step * step);
}

int draft_sizes::rows(int n) const {
    int rows = least_rows_;
    while (rows < n) {
        rows *= 2;
    }
    return rows;
}

}  // namespace dflash
