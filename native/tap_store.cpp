#include "tap_store.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "backend.h"
#include "errors.h"

namespace dflash {

tap_store::tap_store(ggml_backend_dev_t device, int n_features, int n_rows, int n_batch)
    : tensors_(new_tensors(2)) {
    if (n_rows < 1) {
        throw std::invalid_argument("hidden states of " + std::to_string(n_rows) +
                                    " rows; keep at least one");
    }
    states = ggml_new_tensor_2d(tensors_.get(), GGML_TYPE_F32, n_features, n_rows);
    cells = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I64, n_batch);
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(tensors_.get(),
                                                           ggml_backend_dev_buffer_type(device)));
    if (!buffer_) {
        throw backend_error(std::string("no room on ") + ggml_backend_dev_name(device) +
                            " for the hidden states of " + std::to_string(n_rows) + " rows");
    }
    ggml_backend_buffer_clear(buffer_.get(), 0);
}

int64_t tap_store::begin(int n) {
    std::vector<int64_t> places(n);
    for (int i = 0; i < n; i++) {
        places[i] = cell(n_written_ + i);
    }
    ggml_backend_tensor_set(cells, places.data(), 0, places.size() * sizeof(int64_t));
    const int64_t first = n_written_;
    n_written_ += n;
    return first;
}

void tap_store::check(const std::vector<int64_t> & rows) const {
    for (const int64_t row : rows) {
        if (row < 0 || row >= n_written_ || row < n_written_ - n_rows()) {
            throw std::invalid_argument(
                "the hidden states of row " + std::to_string(row) + " are not there; kept are " +
                std::to_string(std::max<int64_t>(0, n_written_ - n_rows())) + " to " +
                std::to_string(n_written_ - 1));
        }
    }
}

void tap_store::read(const std::vector<int64_t> & rows, float * out) const {
    check(rows);
    for (size_t i = 0; i < rows.size();) {
        size_t n = 1;  // adjacent rows are read in one piece
        while (i + n < rows.size() && cell(rows[i + n]) == cell(rows[i]) + static_cast<int>(n)) {
            n++;
        }
        ggml_backend_tensor_get(states, out + i * n_features(), cell(rows[i]) * states->nb[1],
                                n * states->nb[1]);
        i += n;
    }
}

}  // namespace dflash
