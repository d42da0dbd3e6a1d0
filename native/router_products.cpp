#include "router_products.h"

#include <algorithm>
#include <cstring>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "private_abi.h"

namespace dflash {

namespace {

// ggml's own product of two rows, from the library of its CPU backend.
ggml_vec_dot_t find_dot() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (cpu == nullptr) {
        return nullptr;
    }
    const void * inside =
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_threadpool_new");
    const auto traits = reinterpret_cast<decltype(&ggml_get_type_traits_cpu)>(
        private_abi::symbol_beside(inside, "ggml_get_type_traits_cpu"));
    return traits == nullptr ? nullptr : traits(GGML_TYPE_F32)->vec_dot;
}

ggml_vec_dot_t dot() {
    static const ggml_vec_dot_t found = find_dot();
    return found;
}

// products [n_out, n_rows] of weights [n_in, n_out] and rows [n_in, n_rows]
void multiply(ggml_tensor * products, int ith, int nth, void *) {
    const ggml_tensor * weights = products->src[0];
    const ggml_tensor * rows = products->src[1];
    const auto n_in = static_cast<int>(weights->ne[0]);
    const int64_t n_out = products->ne[0];
    const int64_t n = n_out * products->ne[1];
    const int64_t share = (n + nth - 1) / nth;
    for (int64_t i = ith * share; i < std::min(n, (ith + 1) * share); i++) {
        const int64_t out = i % n_out, row = i / n_out;
        dot()(n_in, static_cast<float *>(products->data) + i, 0,
              static_cast<const char *>(weights->data) + out * weights->nb[1], 0,
              static_cast<const char *>(rows->data) + row * rows->nb[1], 0, 1);
    }
}

bool is_router_of_rows(const ggml_tensor * node) {
    if (node->op != GGML_OP_MUL_MAT || std::strstr(node->src[0]->name, "ffn_gate_inp") == nullptr) {
        return false;
    }
    const ggml_tensor * weights = node->src[0];
    const ggml_tensor * rows = node->src[1];
    const bool are_f32 = weights->type == GGML_TYPE_F32 && rows->type == GGML_TYPE_F32;
    const bool is_here = weights->buffer != nullptr && ggml_backend_buffer_is_host(weights->buffer);
    return are_f32 && is_here && rows->ne[1] > 1 && ggml_nrows(rows) == rows->ne[1] &&
           ggml_is_contiguous(node);
}

}  // namespace

void multiply_routers_by_row(ggml_context * nodes, ggml_cgraph * graph) {
    const ggml_tensor * like = nullptr;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (!is_router_of_rows(node) || dot() == nullptr) {
            continue;
        }
        if (like == nullptr) {
            ggml_tensor * inputs[] = {node->src[0], node->src[1]};
            like = ggml_custom_4d(nodes, GGML_TYPE_F32, 1, 1, 1, 1, inputs, 2, &multiply,
                                  GGML_N_TASKS_MAX, nullptr);
        }
        node->op = GGML_OP_CUSTOM;
        std::memcpy(node->op_params, like->op_params, sizeof(node->op_params));
    }
}

}  // namespace dflash
