#include "bf16_weights.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <vector>

#include "backend.h"

namespace dflash {

namespace {

using clock = std::chrono::steady_clock;

// What is left free is for caches that grow, and for other models. Plans do not count these copies.
constexpr size_t share_of_room = 16;
constexpr int64_t rows_at_once = 4096;
constexpr int n_timings = 5;
constexpr int n_products = 4;  // of a timing

bool has_room(ggml_backend_t backend, size_t n_bytes) {
    size_t n_free = 0;
    size_t n_total = 0;
    ggml_backend_dev_memory(ggml_backend_get_device(backend), &n_free, &n_total);
    return n_bytes <= n_free / share_of_room;
}

// How long a product of such a matrix takes. Infinite if the device cannot do it.
double product_time(ggml_backend_t backend, ggml_type type, int64_t width, int64_t n_rows,
                    int64_t n_columns) {
    constexpr size_t n_tensors = 4;
    const ggml_context_ptr context = new_nodes(n_tensors);
    ggml_context * c = context.get();
    ggml_tensor * x = ggml_new_tensor_2d(c, GGML_TYPE_F32, width, n_columns);
    ggml_tensor * weight = ggml_new_tensor_2d(c, type, width, n_rows);
    ggml_tensor * y =
        ggml_mul_mat(c, weight, type == GGML_TYPE_BF16 ? ggml_cast(c, x, GGML_TYPE_BF16) : x);
    ggml_cgraph * graph = ggml_new_graph_custom(c, n_tensors, false);
    ggml_build_forward_expand(graph, y);
    const ggml_backend_buffer_ptr buffer(ggml_backend_supports_op(backend, y)
                                             ? ggml_backend_alloc_ctx_tensors(c, backend)
                                             : nullptr);
    if (!buffer) {
        return std::numeric_limits<double>::infinity();
    }
    // Else our own kernels for few rows, where this backend has them, would not take it.
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_buffer_clear(buffer.get(), 0);
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < n_timings; i++) {
        const auto begin = clock::now();
        for (int j = 0; j < n_products; j++) {
            if (ggml_backend_graph_compute_async(backend, graph) != GGML_STATUS_SUCCESS) {
                return std::numeric_limits<double>::infinity();
            }
        }
        ggml_backend_synchronize(backend);
        best = std::min(best, std::chrono::duration<double>(clock::now() - begin).count());
    }
    return best;
}

// `to`, from row `first_to` on, becomes n rows of `from` from row `first` on, which are uploaded
// first if they are in host memory.
void convert(ggml_backend_t backend, ggml_type type, const void * packed, ggml_tensor * from,
             int64_t first, int64_t n, ggml_tensor * to, int64_t first_to) {
    constexpr size_t n_tensors = 8;
    const int64_t width = to->ne[0];
    const ggml_context_ptr context = new_nodes(n_tensors);
    ggml_context * c = context.get();
    ggml_tensor * rows = from != nullptr
                             ? ggml_view_2d(c, from, width, n, from->nb[1], first * from->nb[1])
                             : ggml_new_tensor_2d(c, type, width, n);
    ggml_tensor * ids = ggml_new_tensor_1d(c, GGML_TYPE_I32, n);
    ggml_tensor * floats = ggml_get_rows(c, rows, ids);
    ggml_tensor * part = ggml_view_2d(c, to, width, n, to->nb[1], first_to * to->nb[1]);
    ggml_cgraph * graph = ggml_new_graph_custom(c, n_tensors, false);
    ggml_build_forward_expand(graph, ggml_cpy(c, floats, part));
    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(c, backend));
    if (!buffer) {
        refuse_room(backend, "weights in bf16");
    }
    if (packed != nullptr) {
        ggml_backend_tensor_set(rows, packed, 0, ggml_nbytes(rows));
    }
    std::vector<int32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    ggml_backend_tensor_set(ids, order.data(), 0, ggml_nbytes(ids));
    start_graph(backend, graph, "to convert weights to bf16");
    ggml_backend_synchronize(backend);
}

}  // namespace

bool becomes_bf16(ggml_backend_t backend, ggml_type type, int64_t width) {
    if (!ggml_is_quantized(type) || ggml_get_type_traits(type)->to_float == nullptr) {
        return false;
    }
    const ggml_context_ptr context = new_tensors(4);
    ggml_context * c = context.get();
    ggml_tensor * rows = ggml_get_rows(c, ggml_new_tensor_2d(c, type, width, 1),
                                       ggml_new_tensor_1d(c, GGML_TYPE_I32, 1));
    return ggml_backend_supports_op(backend, rows);
}

bool pays_in_bf16(ggml_backend_t backend, ggml_type type, int64_t width, int64_t n_rows,
                  int64_t n_columns, size_t n_more) {
    return is_cuda(backend) && becomes_bf16(backend, type, width) && has_room(backend, n_more) &&
           product_time(backend, GGML_TYPE_BF16, width, n_rows, n_columns) <
               product_time(backend, type, width, n_rows, n_columns);
}

void write_as_bf16(ggml_backend_t backend, ggml_type type, const void * rows, int64_t n_rows,
                   ggml_tensor * to, int64_t first) {
    convert(backend, type, rows, nullptr, 0, n_rows, to, first);
}

bf16_copy::bf16_copy(ggml_backend_t backend, ggml_tensor * matrix) : context_(new_tensors(1)) {
    tensor = ggml_new_tensor_2d(context_.get(), GGML_TYPE_BF16, matrix->ne[0], matrix->ne[1]);
    ggml_set_name(tensor, matrix->name);
    buffer_.reset(ggml_backend_alloc_ctx_tensors(context_.get(), backend));
    if (!buffer_) {
        refuse_room(backend, "weights in bf16");
    }
    ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    for (int64_t first = 0; first < tensor->ne[1]; first += rows_at_once) {
        const int64_t n = std::min(rows_at_once, tensor->ne[1] - first);
        convert(backend, matrix->type, nullptr, matrix, first, n, tensor, first);
    }
}

}  // namespace dflash
