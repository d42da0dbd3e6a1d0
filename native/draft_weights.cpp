#include "draft_weights.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "backend.h"
#include "target_tensors.h"

namespace dflash {

draft_weights::draft_weights(const std::string & path, const draft_params & of_file,
                             ggml_backend_t backend, std::optional<bool> bf16)
    : params(of_file), tensors_(path, params, backend, bf16) {
    tokens = tensors_.tokens;
    bind();
    tensors_.read();
    add_up_confidence();
    bound_values();
}

void draft_weights::bind() {
    const int64_t d = params.n_embd;
    const int64_t hd = params.head_dim;
    const int64_t q = hd * params.n_head;
    const int64_t kv = params.n_embd_kv();
    const int64_t n_rows = tokens.empty() ? -1 : static_cast<int64_t>(tokens.size());
    fc = take_matrix("fc", {params.n_features(), d});
    fc_norm = tensors_.take("enc.output_norm.weight", {d});
    out_norm = tensors_.take("output_norm.weight", {d});
    embedding = tensors_.take(embedding_name, {d, -1}, false);
    head = take_matrix("output", {d, n_rows}, !tokens.empty());
    rope_freqs = tensors_.take("rope_freqs.weight", {params.rope.n_dims / 2}, false);
    layers.resize(params.n_layer);
    for (int i = 0; i < params.n_layer; i++) {
        draft_layer & l = layers[i];
        const std::string b = "blk." + std::to_string(i) + ".";
        l.attn_norm = tensors_.take(b + "attn_norm.weight", {d});
        l.attn_q = take_matrix(b + "attn_q", {d, q});
        l.attn_k = take_matrix(b + "attn_k", {d, kv});
        l.attn_v = params.values_from_keys ? nullptr : take_matrix(b + "attn_v", {d, kv});
        l.attn_output = take_matrix(b + "attn_output", {q, d});
        l.attn_sinks = tensors_.take(b + "attn_sinks.weight", {params.n_head}, false);
        l.attn_q_bias = tensors_.take(b + "attn_q.bias", {q}, false);
        l.attn_k_bias = tensors_.take(b + "attn_k.bias", {kv}, false);
        l.attn_v_bias = tensors_.take(b + "attn_v.bias", {kv}, false);
        l.attn_output_bias = tensors_.take(b + "attn_output.bias", {d}, false);
        l.attn_q_norm = tensors_.take(b + "attn_q_norm.weight", {hd});
        l.attn_k_norm = tensors_.take(b + "attn_k_norm.weight", {hd});
        l.attn_post_norm = tensors_.take(b + "post_attention_norm.weight", {d}, false);
        l.ffn_norm = tensors_.take(b + "ffn_norm.weight", {d});
        l.ffn_gate = take_matrix(b + "ffn_gate", {d, -1});
        const int64_t ff = l.ffn_gate->ne[1];
        l.ffn_up = take_matrix(b + "ffn_up", {d, ff});
        l.ffn_down = take_matrix(b + "ffn_down", {ff, d});
        l.ffn_post_norm = tensors_.take(b + "post_ffw_norm.weight", {d}, false);
        l.output_scale = tensors_.take(b + "layer_output_scale.weight", {1}, false);
        if (params.selector.rank > 0) {
            l.attn_conv = take_conv(b + "attn_conv");
            l.ffn_conv = take_conv(b + "ffn_conv");
        }
    }
    bind_heads();
    bind_stacks();
}

conv_weights draft_weights::take_conv(const std::string & name) {
    const selector_params & p = params.selector;
    const int64_t n_groups = params.n_embd / p.group_size;
    conv_weights conv;
    conv.base = tensors_.take(name + "_base", {params.n_embd, int64_t{2} * p.kernel_size});
    conv.proj = tensors_.take(name + "_proj.weight", {params.n_embd, n_groups * 2 * p.kernel_size});
    return conv;
}

void draft_weights::bind_heads() {
    const int64_t d = params.n_embd;
    const int64_t n_rows = tokens.empty() ? -1 : static_cast<int64_t>(tokens.size());
    if (params.markov_rank > 0) {
        const int64_t rank = params.markov_rank;
        anchor_table = tensors_.take(markov_name, {rank, -1});
        markov.before = tensors_.take(markov_drafted, {rank, n_rows});
        markov.after = take_matrix("markov_w2", {rank, n_rows});
        confidence_ = tensors_.take(confidence_name, {d + rank, 1}, false);
        confidence_bias_ = tensors_.take("conf_proj.bias", {1}, false);
        if (confidence_ != nullptr) {
            markov.confidence = tensors_.take(confidence_of_state, {d, 1});
        }
    }
    if (params.selector.rank > 0) {
        const int64_t rank = params.selector.rank;
        anchor_table = tensors_.take(selector_name, {rank, -1});
        selector.before = tensors_.take(selector_drafted, {rank, n_rows});
        selector.after = tensors_.take(selector_after_name, {rank, n_rows});
        selector.gate = tensors_.take("selector_hidden.weight", {d, rank});
    }
}

ggml_tensor * draft_weights::take_matrix(const std::string & name, std::vector<int64_t> shape,
                                         bool required) {
    ggml_tensor * matrix = tensors_.take(name + ".weight", std::move(shape), required);
    if (ggml_tensor * scale = tensors_.take(name + ".scale", {1}, false)) {
        scales_[matrix] = scale;
    }
    return matrix;
}

void draft_weights::bind_stacks() {
    ggml_context * c = tensors_.on_device();
    const int64_t d = params.n_embd;
    const int64_t q = static_cast<int64_t>(params.head_dim) * params.n_head;
    const int64_t kv = params.n_embd_kv();
    const int64_t qkv = q + 2 * kv;
    const auto together = [](const ggml_tensor * a, const ggml_tensor * b) {
        return a != nullptr && b != nullptr && a->view_src != nullptr && a->view_src == b->view_src;
    };
    for (draft_layer & l : layers) {
        // Matrices of a single row are stacked like vectors, end to end, which does not serve here.
        if (together(l.ffn_gate, l.ffn_up) && l.ffn_gate->view_src->ne[0] == d) {
            l.ffn_gate_up = l.ffn_gate->view_src;
        }
        const bool has_bias = l.attn_q_bias || l.attn_k_bias || l.attn_v_bias;
        const bool one_bias =
            together(l.attn_q_bias, l.attn_k_bias) && together(l.attn_q_bias, l.attn_v_bias);
        if (!together(l.attn_q, l.attn_k) || !together(l.attn_q, l.attn_v) ||
            (has_bias && !one_bias)) {
            continue;
        }
        ggml_tensor * all = l.attn_q->view_src;
        l.attn_qkv = ggml_view_2d(c, all, d, qkv, all->nb[1], l.attn_q->view_offs);
        if (one_bias) {
            l.attn_qkv_bias =
                ggml_view_1d(c, l.attn_q_bias->view_src, qkv, l.attn_q_bias->view_offs);
        }
    }
    const draft_layer & first = layers.front();
    const draft_layer & last = layers.back();
    const bool all_bias = first.attn_qkv_bias != nullptr;
    if (!together(first.attn_q, last.attn_q) || !together(first.attn_k_norm, last.attn_k_norm) ||
        (all_bias && !together(first.attn_q_bias, last.attn_q_bias))) {
        return;
    }
    for (const draft_layer & l : layers) {
        if (l.attn_qkv == nullptr || (l.attn_qkv_bias != nullptr) != all_bias) {
            return;  // some layers have biases, others none
        }
    }
    const int64_t n = params.n_layer;
    ggml_tensor * all = first.attn_q->view_src;
    all_kv = ggml_view_3d(c, all, d, 2 * kv, n, all->nb[1], qkv * all->nb[1], q * all->nb[1]);
    all_k_norm = ggml_reshape_4d(c, first.attn_k_norm->view_src, params.head_dim, 1, 1, n);
    if (all_bias) {
        ggml_tensor * bias = first.attn_q_bias->view_src;
        all_kv_bias =
            ggml_view_3d(c, bias, 2 * kv, 1, n, bias->nb[0], qkv * bias->nb[0], q * bias->nb[0]);
    }
}

namespace {

float peak_of(const ggml_tensor * floats) {
    std::vector<float> values(ggml_nelements(floats));
    ggml_backend_tensor_get(floats, values.data(), 0, ggml_nbytes(floats));
    return std::accumulate(values.begin(), values.end(), 0.0f,
                           [](float peak, float x) { return std::max(peak, std::abs(x)); });
}

// The length of the longest row.
float length_of(const ggml_tensor * matrix) {
    float longest = 0.0f;
    std::vector<float> row;
    for (int64_t i = 0; i < matrix->ne[1]; i++) {
        read_row(matrix, static_cast<int32_t>(i), row);
        longest = std::max(longest, std::inner_product(row.begin(), row.end(), row.begin(), 0.0f));
    }
    return std::sqrt(longest);
}

}  // namespace

// A value is the product of a row of weights and of what a norm puts out, which may be convolved.
void draft_weights::bound_values() {
    constexpr float large = 16384.0f;  // attention adds up several such as halves
    const float of_unit = std::sqrt(static_cast<float>(params.n_embd));
    const float of_context = of_unit * peak_of(fc_norm);
    for (const draft_layer & l : layers) {
        if (l.attn_v == nullptr) {
            return;  // they are normed
        }
        float input = of_unit * peak_of(l.attn_norm);
        if (l.attn_conv.base != nullptr) {
            const auto n_taps = static_cast<float>(params.selector.kernel_size);
            input *= n_taps * (peak_of(l.attn_conv.base) + input * length_of(l.attn_conv.proj));
        }
        float bound = std::max(input, of_context) * length_of(l.attn_v);
        if (const ggml_tensor * scale = scale_of(l.attn_v)) {
            bound *= peak_of(scale);
        }
        if (l.attn_v_bias != nullptr) {
            bound += peak_of(l.attn_v_bias);
        }
        has_large_values = has_large_values || !(bound < large);
    }
}

// The confidence is a sum of what the state adds and of what the token before does. The host adds
// the latter, as it knows that token.
void draft_weights::add_up_confidence() {
    if (confidence_ == nullptr) {
        return;
    }
    const auto * all = static_cast<const float *>(confidence_->data);
    ggml_backend_tensor_set(markov.confidence, all, 0, ggml_nbytes(markov.confidence));
    const float * of_rank = all + params.n_embd;
    float bias = 0.0f;
    if (confidence_bias_ != nullptr) {
        ggml_backend_tensor_get(confidence_bias_, &bias, 0, sizeof(float));
    }
    std::vector<float> row;
    markov.of_token.resize(anchor_table->ne[1]);
    for (int64_t token = 0; token < anchor_table->ne[1]; token++) {
        read_row(anchor_table, static_cast<int32_t>(token), row);
        markov.of_token[token] = std::inner_product(row.begin(), row.end(), of_rank, bias);
    }
}

}  // namespace dflash
