#include "few_rows_cpu.h"

#include <algorithm>

#include "backend.h"

namespace dflash {

namespace {

class cpu_executor : public few_rows_executor {
  public:
    bool reads(const ggml_tensor & t) const override {
        return t.buffer != nullptr && ggml_backend_buffer_is_host(t.buffer) &&
               ggml_backend_buffer_get_usage(t.buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    }
    bool has(const few_rows_kernel &) const override { return true; }
    bool has(const few_rows_attention_kernel &) const override { return true; }
    int n_processors() const override { return 4; }
    scratch reserve(size_t, size_t, size_t, size_t) override { return {}; }

    void convert(const few_rows::conversion & c) override {
        x_.resize(static_cast<size_t>(c.n_columns) * c.k);
        for (int i = 0; i < c.n_columns; i++) {
            std::copy_n(c.x + i * c.stride, c.k, x_.data() + static_cast<size_t>(i) * c.k);
        }
    }

    void normalize(const few_rows::normalization & n) override {
        const ggml_context_ptr made = new_nodes(8);
        ggml_context * ctx = made.get();
        const few_rows::conversion & c = n.input;
        ggml_tensor * x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, c.k, c.n_columns);
        x->nb[1] = c.stride * sizeof(float);
        x->data = const_cast<float *>(c.x);
        ggml_tensor * weight = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, c.k);
        weight->data = const_cast<float *>(n.weight);
        ggml_tensor * norm = ggml_rms_norm(ctx, x, n.epsilon);
        ggml_tensor * scaled = ggml_mul(ctx, norm, weight);
        std::vector<float> normed(ggml_nelements(norm)), result(ggml_nelements(norm));
        norm->data = normed.data();
        scaled->data = result.data();
        ggml_cgraph * graph = ggml_new_graph_custom(ctx, 8, false);
        ggml_build_forward_expand(graph, scaled);
        run(graph);
        for (int i = 0; i < c.n_columns; i++) {
            std::copy_n(result.data() + static_cast<size_t>(i) * c.k, c.k,
                        n.normal + i * n.normal_stride);
        }
        few_rows::conversion converted = c;
        converted.x = n.normal;
        converted.stride = n.normal_stride;
        convert(converted);
    }

    void multiply(const few_rows_plan::launch & l, const few_rows::product & p) override {
        const ggml_context_ptr made = new_nodes(32);
        ggml_context * ctx = made.get();
        std::vector<std::vector<float>> results;  // of all nodes
        ggml_cgraph * graph = ggml_new_graph_custom(ctx, 32, false);
        const auto node = [&](ggml_tensor * t) {
            t->data = results.emplace_back(ggml_nelements(t)).data();
            ggml_build_forward_expand(graph, t);
            return t;
        };
        ggml_tensor * x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, p.k, p.n_columns);
        x->data = x_.data();
        std::vector<ggml_tensor *> outs;
        for (int i = 0; i < p.n_matrices; i++) {
            const few_rows::matrix & m = p.matrices[i];
            const ggml_type type = (m.type == 0 ? l.kernel.a : l.kernel.b).type;
            ggml_tensor * w = ggml_new_tensor_2d(ctx, type, p.k, m.rows);
            w->data = const_cast<unsigned char *>(m.weights);
            ggml_tensor * y = node(ggml_mul_mat(ctx, w, x));
            if (m.bias != nullptr) {
                ggml_tensor * bias = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, m.rows);
                bias->data = const_cast<float *>(m.bias);
                y = node(ggml_add(ctx, y, bias));
            }
            outs.push_back(y);
        }
        if (p.activation != few_rows::NONE) {
            outs = {node(activated(ctx, p, outs[0], outs[1]))};
        }
        for (size_t i = 0; i < outs.size(); i++) {
            const few_rows::matrix & m = p.matrices[i];
            if (m.gate != nullptr) {
                ggml_tensor * gate = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 1, p.n_columns);
                gate->data = const_cast<float *>(m.gate);
                outs[i] = node(ggml_mul(ctx, outs[i], node(ggml_sigmoid(ctx, gate))));
            }
            for (int r = 0; r < 2 && m.residuals[r] != nullptr; r++) {
                ggml_tensor * residual =
                    ggml_new_tensor_2d(ctx, GGML_TYPE_F32, m.rows, p.n_columns);
                residual->nb[1] = m.residual_strides[r] * sizeof(float);
                residual->data = const_cast<float *>(m.residuals[r]);
                outs[i] = node(ggml_add(ctx, outs[i], residual));
            }
        }
        run(graph);
        for (size_t i = 0; i < outs.size(); i++) {
            const few_rows::matrix & m = p.matrices[i];
            const auto * y = static_cast<const float *>(outs[i]->data);
            for (int n = 0; n < p.n_columns; n++, y += m.rows) {
                std::copy_n(y, m.rows, m.out + n * m.out_stride);
            }
        }
    }

    void attend(const few_rows_plan::attention & planned,
                const few_rows::attention & arguments) override {
        compute(*planned.node);
        if (planned.converts) {
            few_rows::conversion c{};
            c.x = arguments.out;
            c.k = arguments.n_heads * arguments.head_dim;
            c.stride = static_cast<unsigned>(c.k);
            c.n_columns = arguments.n_rows * arguments.n_streams;
            convert(c);
        }
    }

    void multiply(const few_rows_plan::plain & planned) override {
        for (const ggml_tensor * node : planned.nodes) {
            compute(*node);
        }
    }
    void order(const few_rows::chosen_input & c) override {
        if (c.input.n_columns > 0) {
            convert(c.input);
        }
    }
    void multiply(const few_rows_plan::experts & planned,
                  const few_rows::expert_product &) override {
        for (const ggml_tensor * node : planned.before) {
            compute(*node);
        }
        compute(*planned.node);
    }

    // What comes again is told apart, but there is nothing that could be recorded.
    bool records(const private_abi::graph &) const override { return true; }

  private:
    // A node alone, by ggml.
    void compute(const ggml_tensor & node) {
        const ggml_context_ptr made = new_nodes(8);
        ggml_context * ctx = made.get();
        ggml_tensor * again = ggml_dup_tensor(ctx, &node);
        again->op = node.op;
        again->data = node.data;
        std::copy(std::begin(node.op_params), std::end(node.op_params), again->op_params);
        for (int i = 0; i < GGML_MAX_SRC; i++) {
            if (const ggml_tensor * source = node.src[i]; source != nullptr) {
                again->src[i] = ggml_dup_tensor(ctx, source);
                again->src[i]->data = source->data;
                std::copy(std::begin(source->nb), std::end(source->nb), again->src[i]->nb);
            }
        }
        ggml_cgraph * graph = ggml_new_graph_custom(ctx, 8, false);
        ggml_build_forward_expand(graph, again);
        run(graph);
    }

    void run(ggml_cgraph * graph) {
        if (!backend_) {  // not before: the first backend is opened in the midst of a scope
            backend_.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
        }
        start_graph(backend_.get(), graph, "to multiply");
    }

    static ggml_tensor * activated(ggml_context * ctx, const few_rows::product & p,
                                   ggml_tensor * gate, ggml_tensor * up) {
        switch (p.activation) {
            case few_rows::SWIGLU: return ggml_swiglu_split(ctx, gate, up);
            case few_rows::GEGLU: return ggml_geglu_split(ctx, gate, up);
            default: return ggml_swiglu_oai(ctx, gate, up, p.alpha, p.limit);
        }
    }

    std::vector<float> x_;
    ggml_backend_ptr backend_;
};

}  // namespace

std::unique_ptr<few_rows_executor> few_rows_on_cpu() { return std::make_unique<cpu_executor>(); }

}  // namespace dflash
