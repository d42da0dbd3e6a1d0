#include "draft_graph.h"

#include <string>

#include "errors.h"

namespace dflash {

namespace {

constexpr size_t nodes_per_layer = 64;  // more than any layer makes

}  // namespace

draft_graph::draft_graph(const draft_weights & weights, const target_tensors & target,
                         const draft_cache & cache, ggml_backend_t backend,
                         const draft_bucket & size, const draft_capabilities & allowed)
    : bucket(size),
      weights_(weights),
      target_(target),
      cache_(cache),
      backend_(backend),
      allowed_(allowed) {
    create_inputs();
    build();
    allocate();
}

void draft_graph::create_inputs() {
    const draft_params & p = weights_.params;
    inputs_.reset(ggml_init({ggml_tensor_overhead() * 16, nullptr, /*no_alloc=*/true}));
    ggml_context * c = inputs_.get();
    features = ggml_new_tensor_2d(c, GGML_TYPE_F32, p.n_features(), bucket.n_rows);
    row_positions = ggml_new_tensor_1d(c, GGML_TYPE_I32, bucket.n_rows);
    row_cells = ggml_new_tensor_1d(c, GGML_TYPE_I64, bucket.n_rows);
    if (bucket.n_streams > 0) {
        const int n = p.block_size * bucket.n_streams;
        block = ggml_new_tensor_3d(c, GGML_TYPE_F32, p.n_embd, p.block_size, bucket.n_streams);
        block_positions = ggml_new_tensor_1d(c, GGML_TYPE_I32, n);
        block_cells = ggml_new_tensor_1d(c, GGML_TYPE_I64, n);
        mask = ggml_new_tensor_4d(c, GGML_TYPE_F16, bucket.n_kv, p.block_size, 1, bucket.n_streams);
        if (p.sliding_window > 0) {
            sliding_mask = ggml_dup_tensor(c, mask);
        }
    }
    input_buffer_.reset(ggml_backend_alloc_ctx_tensors(c, backend_));
    if (!input_buffer_) {
        throw backend_error("no room for the inputs of the draft graph on " +
                            std::string(ggml_backend_name(backend_)));
    }
    ggml_backend_buffer_clear(input_buffer_.get(), 0);
}

ggml_tensor * draft_graph::norm(ggml_tensor * x, ggml_tensor * weight) const {
    return ggml_mul(nodes_.get(), ggml_rms_norm(nodes_.get(), x, weights_.params.rms_eps), weight);
}

// `bias` may be null.
ggml_tensor * draft_graph::project(ggml_tensor * x, ggml_tensor * weight,
                                   ggml_tensor * bias) const {
    ggml_tensor * y = ggml_mul_mat(nodes_.get(), weight, x);
    return bias != nullptr ? ggml_add(nodes_.get(), y, bias) : y;
}

ggml_tensor * draft_graph::rope(ggml_tensor * x, ggml_tensor * positions) const {
    const rope_params & r = weights_.params.rope;
    return ggml_rope_ext(nodes_.get(), x, positions, weights_.rope_freqs, r.n_dims,
                         GGML_ROPE_TYPE_NEOX, r.n_ctx_orig, r.freq_base, r.freq_scale, r.ext_factor,
                         r.attn_factor, r.beta_fast, r.beta_slow);
}

// K and V of the columns of x, at their own positions, into their cells.
void draft_graph::store(int layer, ggml_tensor * x, ggml_tensor * positions, ggml_tensor * cells) {
    ggml_context * c = nodes_.get();
    const draft_params & p = weights_.params;
    const draft_layer & l = weights_.layers[layer];
    const int64_t n = x->ne[1];
    ggml_tensor * k = project(x, l.attn_k, l.attn_k_bias);
    k = ggml_reshape_3d(c, k, p.head_dim, p.n_head_kv, n);
    k = rope(norm(k, l.attn_k_norm), positions);
    ggml_tensor * v = project(x, l.attn_v, l.attn_v_bias);
    k = ggml_reshape_2d(c, k, p.n_embd_kv(), n);
    ggml_build_forward_expand(graph_, ggml_set_rows(c, cache_.k[layer], k, cells));
    ggml_build_forward_expand(graph_, ggml_set_rows(c, cache_.v[layer], v, cells));
}

// q: [head_dim, n_head, block_size * n_streams], roped. Returns [n_head * head_dim, same columns].
ggml_tensor * draft_graph::attention(int layer, ggml_tensor * q) {
    ggml_context * c = nodes_.get();
    const draft_params & p = weights_.params;
    ggml_tensor * m = p.is_sliding[layer] ? sliding_mask : mask;
    ggml_tensor * k = cache_.view(c, cache_.k[layer], bucket.n_kv, bucket.n_streams);
    ggml_tensor * v = cache_.view(c, cache_.v[layer], bucket.n_kv, bucket.n_streams);
    q = ggml_reshape_4d(c, q, p.head_dim, p.n_head, p.block_size, bucket.n_streams);
    q = ggml_permute(c, q, 0, 2, 1, 3);

    ggml_tensor * out = ggml_flash_attn_ext(c, q, k, v, m, p.attention_scale, 0.0f, 0.0f);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    if (!allowed_.flash_attention || !supports(out)) {
        ggml_tensor * scores = ggml_mul_mat(c, k, q);
        ggml_prec_set_acc(scores, GGML_PREC_F32);
        ggml_tensor * weights = ggml_soft_max_ext(c, scores, m, p.attention_scale, 0.0f);
        ggml_tensor * vt = ggml_cont(c, ggml_permute(c, v, 1, 0, 2, 3));
        out = ggml_permute(c, ggml_mul_mat(c, vt, weights), 0, 2, 1, 3);
        out = ggml_cont(c, out);
    }
    return ggml_reshape_2d(c, out, static_cast<int64_t>(p.head_dim) * p.n_head,
                           static_cast<int64_t>(p.block_size) * bucket.n_streams);
}

ggml_tensor * draft_graph::feed_forward(int layer, ggml_tensor * x) const {
    ggml_context * c = nodes_.get();
    const draft_layer & l = weights_.layers[layer];
    ggml_tensor * gate = ggml_mul_mat(c, l.ffn_gate, x);
    ggml_tensor * up = ggml_mul_mat(c, l.ffn_up, x);
    ggml_tensor * h =
        weights_.params.gelu ? ggml_geglu_split(c, gate, up) : ggml_swiglu_split(c, gate, up);
    return ggml_mul_mat(c, l.ffn_down, h);
}

void draft_graph::build() {
    const draft_params & p = weights_.params;
    const size_t n_nodes = nodes_per_layer * (p.n_layer + 1);
    nodes_.reset(
        ggml_init({ggml_tensor_overhead() * n_nodes + ggml_graph_overhead_custom(n_nodes, false),
                   nullptr, /*no_alloc=*/true}));
    ggml_context * c = nodes_.get();
    graph_ = ggml_new_graph_custom(c, n_nodes, false);

    ggml_tensor * g = norm(ggml_mul_mat(c, weights_.fc, features), weights_.fc_norm);
    for (int i = 0; i < p.n_layer; i++) {
        store(i, g, row_positions, row_cells);
    }
    if (bucket.n_streams == 0) {
        return;
    }

    const int64_t n = static_cast<int64_t>(p.block_size) * bucket.n_streams;
    ggml_tensor * x = ggml_reshape_2d(c, block, p.n_embd, n);
    for (int i = 0; i < p.n_layer; i++) {
        const draft_layer & l = weights_.layers[i];
        ggml_tensor * h = norm(x, l.attn_norm);
        ggml_tensor * q = project(h, l.attn_q, l.attn_q_bias);
        q = ggml_reshape_3d(c, q, p.head_dim, p.n_head, n);
        q = rope(norm(q, l.attn_q_norm), block_positions);
        store(i, h, block_positions, block_cells);
        h = attention(i, q);
        if (p.value_scale != 0.0f) {
            h = ggml_scale(c, h, p.value_scale);
        }
        h = project(h, l.attn_output, l.attn_output_bias);
        if (l.attn_post_norm != nullptr) {
            h = norm(h, l.attn_post_norm);
        }
        x = ggml_add(c, h, x);
        h = feed_forward(i, norm(x, l.ffn_norm));
        if (l.ffn_post_norm != nullptr) {
            h = norm(h, l.ffn_post_norm);
        }
        x = ggml_add(c, h, x);
        if (l.output_scale != nullptr) {
            x = ggml_mul(c, x, l.output_scale);
        }
    }
    output(x);
}

// Logits as the drafter was trained to put them out: scaled, then capped softly.
ggml_tensor * draft_graph::capped(ggml_tensor * x) const {
    ggml_context * c = nodes_.get();
    const draft_params & p = weights_.params;
    if (p.logit_scale != 0.0f) {
        x = ggml_scale(c, x, p.logit_scale);
    }
    if (p.logit_cap != 0.0f) {
        x = ggml_tanh(c, ggml_scale(c, x, 1.0f / p.logit_cap));
        x = ggml_scale(c, x, p.logit_cap);
    }
    return x;
}

void draft_graph::output(ggml_tensor * x) {
    ggml_context * c = nodes_.get();
    const draft_params & p = weights_.params;
    const int64_t rows = static_cast<int64_t>(bucket.n_draft) * bucket.n_streams;
    // The anchor's own output is not a draft: positions p+1 .. p+n_draft of every block.
    const size_t column = p.n_embd * sizeof(float);
    x = ggml_view_3d(c, x, p.n_embd, bucket.n_draft, bucket.n_streams, column,
                     column * p.block_size, column);
    x = ggml_reshape_2d(c, ggml_cont(c, x), p.n_embd, rows);
    ggml_tensor * head = weights_.head != nullptr ? weights_.head : target_.head;
    logits = capped(ggml_mul_mat(c, head, norm(x, weights_.out_norm)));

    // log p of the best only: softmax over whole rows on the device, then a gather.
    ggml_tensor * best = ggml_top_k(c, logits, bucket.top_k);
    ggml_tensor * p_all = ggml_reshape_3d(c, ggml_soft_max(c, logits), 1, logits->ne[0], rows);
    ggml_tensor * p_best = ggml_get_rows(c, p_all, best);
    ggml_tensor * log_p = ggml_log(c, p_best);
    if (allowed_.top_k && supports(best) && supports(p_best) && supports(log_p)) {
        ids = best;
        logprobs = log_p;
        ggml_set_output(ids);
        ggml_set_output(logprobs);
        ggml_build_forward_expand(graph_, ids);
        ggml_build_forward_expand(graph_, logprobs);
    } else {
        ggml_set_output(logits);
        ggml_build_forward_expand(graph_, logits);
    }
}

void draft_graph::allocate() {
    for (int i = 0; i < ggml_graph_n_nodes(graph_); i++) {
        const ggml_tensor * node = ggml_graph_node(graph_, i);
        if (!supports(node)) {
            throw backend_error(std::string(ggml_backend_name(backend_)) + " lacks " +
                                ggml_op_desc(node) + " for " + ggml_type_name(node->type) +
                                ", which the draft graph needs; load without a drafter");
        }
    }
    allocator_.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend_)));
    if (!ggml_gallocr_alloc_graph(allocator_.get(), graph_)) {
        throw backend_error("no room for the draft graph on " +
                            std::string(ggml_backend_name(backend_)));
    }
}

void draft_graph::compute() {
    const ggml_status status = ggml_backend_graph_compute(backend_, graph_);
    if (status != GGML_STATUS_SUCCESS) {
        throw backend_error(std::string(ggml_backend_name(backend_)) +
                            " failed on the draft graph: " + ggml_status_to_string(status));
    }
}

}  // namespace dflash
