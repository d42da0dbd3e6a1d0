#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

#include "backend.h"
#include "check.h"
#include "draft_scratch.h"

// Rows of logits in memory of the CPU's backend.
struct logit_rows {
    logit_rows(int64_t n_vocab, int64_t n_rows)
        : backend(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr)),
          inputs(dflash::new_tensors(1)),
          tensor(ggml_new_tensor_2d(inputs.get(), GGML_TYPE_F32, n_vocab, n_rows)),
          buffer(ggml_backend_alloc_ctx_tensors(inputs.get(), backend.get())),
          values(n_vocab * n_rows) {}

    // Random ones. `step`: they are its multiples, so that some are equal.
    void fill(int64_t seed, float step = 0.0f) {
        std::mt19937 random(static_cast<uint32_t>(seed));
        std::normal_distribution<float> normal(0.0f, 3.0f);
        for (float & x : values) {
            x = step > 0 ? std::round(normal(random) / step) * step : normal(random);
        }
        set();
    }

    void set() { ggml_backend_tensor_set(tensor, values.data(), 0, values.size() * sizeof(float)); }

    float * row(int64_t i) { return values.data() + i * tensor->ne[0]; }
    std::vector<float> copy_of(int64_t i) { return {row(i), row(i + 1)}; }

    ggml_backend_ptr backend;
    ggml_context_ptr inputs;
    ggml_tensor * tensor;
    ggml_backend_buffer_ptr buffer;
    std::vector<float> values;
};

// A graph that computes these rows, and more of them.
struct logit_graph {
    explicit logit_graph(const logit_rows & rows)
        : backend(rows.backend.get()),
          nodes(dflash::new_nodes(n_nodes)),
          graph(ggml_new_graph_custom(nodes.get(), n_nodes, false)),
          scratch(backend),
          logits(ggml_scale(nodes.get(), rows.tensor, 1.0f)) {}

    void run(std::initializer_list<ggml_tensor *> results) {
        for (ggml_tensor * result : results) {
            ggml_set_output(result);
            ggml_build_forward_expand(graph, result);
        }
        check::that(scratch.allocate(graph), "no memory for the graph");
        check::equal(ggml_backend_graph_compute(backend, graph), GGML_STATUS_SUCCESS, "status");
    }

    template <typename T>
    static std::vector<T> of(const ggml_tensor * result) {
        std::vector<T> values(ggml_nelements(result));
        ggml_backend_tensor_get(result, values.data(), 0, ggml_nbytes(result));
        return values;
    }

    static constexpr size_t n_nodes = 80;
    ggml_backend_t backend;
    ggml_context_ptr nodes;
    ggml_cgraph * graph;
    dflash::draft_scratch scratch;
    ggml_tensor * logits;
};
