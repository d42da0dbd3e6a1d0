#include "draft_graph.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "backend.h"
#include "errors.h"
#include "wide_product.h"

namespace dflash {

namespace {

// More nodes than are built: for a layer, for each tap of its convolutions, for a head, and for
// each position that a Markov head follows.
constexpr size_t nodes_per_layer = 160;
constexpr size_t nodes_per_tap = 16;
constexpr size_t nodes_per_head = 256;
constexpr size_t nodes_per_draft = 40;
// The cache holds halves, and attention adds up halves. So large values are kept in larger units,
// and what is still too large as the largest that leaves room for a sum.
constexpr float value_unit = 1024.0f;
constexpr float largest_value = 4096.0f;
// A GPU takes as long for a round of guesses as for two or three positions one after the other.
// With a trained Markov head, all tokens that the target accepted, and the next one, were those of
// the exact path in 90, 95, 98 and 99 % of the drafts after 1, 2, 3 and 4 rounds. The accepted
// length was that of the exact path after 2, and 0.98 to 1 of it after 1. So many sequences, whose
// rounds take three times as long, get 2.
constexpr int usual_rounds = 4;
constexpr int rounds_of_many = 2;
constexpr int many_streams = 4;

// DFlash 2: convolutions over the positions of a block, before a part of a layer and after it. Each
// position is mixed with those before it in its block. The kernels are a constant one per channel
// plus one per group of channels that follows from the part's input.
//
// Weights have their taps in reverse: the last one is for the position itself.
class draft_conv {
  public:
    // base: see conv_weights. of_groups: the product of its `proj` and of what the part is given,
    // f32 [groups * 2 n_taps, block * n_streams].
    draft_conv(ggml_context * nodes, const draft_params & params, ggml_tensor * base,
               ggml_tensor * of_groups);

    // x: f32 [n_embd, block * n_streams]
    ggml_tensor * before(ggml_tensor * x) const { return mix(x, 0); }
    ggml_tensor * after(ggml_tensor * x) const { return mix(x, 1); }

  private:
    ggml_tensor * mix(ggml_tensor * x, int side) const;

    ggml_context * nodes_;
    int64_t n_taps_;
    int64_t block_;
    ggml_tensor * kernels_;  // f32 [n_embd, 2 n_taps, block * n_streams]
};

draft_conv::draft_conv(ggml_context * nodes, const draft_params & params, ggml_tensor * base,
                       ggml_tensor * of_groups)
    : nodes_(nodes), n_taps_(params.selector.kernel_size), block_(params.block_size) {
    const int64_t size = params.selector.group_size;
    const int64_t n_groups = params.n_embd / size;
    const int64_t n = of_groups->ne[1];
    of_groups = ggml_reshape_4d(nodes_, of_groups, 1, n_groups, 2 * n_taps_, n);
    ggml_tensor * of_channels = ggml_repeat_4d(nodes_, of_groups, size, n_groups, 2 * n_taps_, n);
    of_channels = ggml_reshape_3d(nodes_, of_channels, params.n_embd, 2 * n_taps_, n);
    kernels_ = ggml_add(nodes_, of_channels, base);
}

ggml_tensor * draft_conv::mix(ggml_tensor * x, int side) const {
    const int64_t width = x->ne[0];
    const int64_t n_streams = x->ne[1] / block_;
    const size_t row = x->nb[1];
    ggml_tensor * sum = nullptr;
    // How far back a position looks: the last tap is for the position itself.
    for (int64_t back = 0; back < std::min(n_taps_, block_); back++) {
        const int64_t n = block_ - back;
        const int64_t tap = (side + 1) * n_taps_ - 1 - back;
        ggml_tensor * kernel =
            ggml_view_3d(nodes_, kernels_, width, n, n_streams, kernels_->nb[2],
                         kernels_->nb[2] * block_, tap * kernels_->nb[1] + back * kernels_->nb[2]);
        ggml_tensor * rows = ggml_view_3d(nodes_, x, width, n, n_streams, row, row * block_, 0);
        ggml_tensor * part = ggml_mul(nodes_, kernel, rows);
        sum = sum == nullptr ? part
                             : ggml_acc(nodes_, sum, part, sum->nb[1], sum->nb[2], sum->nb[3],
                                        back * sum->nb[1]);
    }
    return ggml_reshape_2d(nodes_, sum, width, block_ * n_streams);
}

}  // namespace

draft_graph::draft_graph(const draft_parts & parts, const draft_bucket & size,
                         const draft_capabilities & allowed)
    : bucket(size), parts_(parts), p_(parts.weights.params), allowed_(allowed) {
    create_inputs();
    if (bucket.n_streams > 0) {
        create_mask_rows();
    }
    build();
    allocate();
}

void draft_graph::create_inputs() {
    const int64_t n_rows = bucket.n_rows;
    if (bucket.stored) {
        stored_cells_ = inputs_.add(GGML_TYPE_I32, {n_rows});
    } else {
        features_ = inputs_.add(GGML_TYPE_F32, {p_.n_features(), n_rows});
    }
    row_positions_ = inputs_.add(GGML_TYPE_I32, {n_rows * p_.n_layer});
    row_cells_ = inputs_.add(GGML_TYPE_I64, {n_rows * p_.n_layer});
    if (bucket.n_streams > 0) {
        const int64_t block = p_.block_size;
        const int64_t n = bucket.n_streams;
        anchors_ = inputs_.add(GGML_TYPE_F32, {p_.n_embd, 1, n});
        if (p_.rank() > 0) {
            anchor_rows_ = inputs_.add(GGML_TYPE_F32, {p_.rank(), n});
        }
        anchor_tokens.resize(n);
        block_positions_ = inputs_.add(GGML_TYPE_I32, {block * n});
        block_cells_ = inputs_.add(GGML_TYPE_I64, {block * n});
        mask_ = inputs_.add(GGML_TYPE_F16, {bucket.n_kv, block, 1, n});
        if (p_.sliding_window > 0) {
            sliding_mask_ = inputs_.add(GGML_TYPE_F16, {bucket.n_kv, block, 1, n});
        }
    }
    inputs_.place(parts_.backend);
}

// The rows of a block after the anchor, which never change.
void draft_graph::create_mask_rows() {
    constants_ = new_tensors(1);
    mask_rows_ = ggml_new_tensor_3d(constants_.get(), GGML_TYPE_F32, p_.n_embd, p_.block_size - 1,
                                    bucket.n_streams);
    constant_buffer_.reset(ggml_backend_alloc_ctx_tensors(constants_.get(), parts_.backend));
    if (!constant_buffer_) {
        refuse_room(parts_.backend, "the inputs of the draft graph");
    }
    const size_t n = parts_.mask_row.size() * sizeof(float);
    for (int64_t i = 0; i < ggml_nrows(mask_rows_); i++) {
        ggml_backend_tensor_set(mask_rows_, parts_.mask_row.data(), i * n, n);
    }
}

ggml_tensor * draft_graph::norm(ggml_tensor * x, ggml_tensor * weight) const {
    return ggml_mul(nodes_.get(), ggml_rms_norm(nodes_.get(), x, p_.rms_eps), weight);
}

ggml_tensor * draft_graph::project(ggml_tensor * x, ggml_tensor * weight, ggml_tensor * bias,
                                   bool is_wide) const {
    x = as_weights(x, weight);
    ggml_tensor * y =
        is_wide ? wide_product(nodes_.get(), weight, x) : ggml_mul_mat(nodes_.get(), weight, x);
    if (ggml_tensor * scale = parts_.weights.scale_of(weight)) {
        y = ggml_mul(nodes_.get(), y, scale);
    }
    return bias != nullptr ? ggml_add(nodes_.get(), y, bias) : y;
}

// The input of a product, in the type of its weights where that makes it faster: with inputs of f32
// and few columns CUDA does not use cuBLAS. The layers of an 8B drafter in bf16 take an H200 577
// microseconds with it, 695 without. Our own kernels take floats as they are.
ggml_tensor * draft_graph::as_weights(ggml_tensor * x, const ggml_tensor * weight) const {
    constexpr int64_t fewest = 8;
    constexpr int64_t most = 16;
    const int64_t n = x->ne[1];
    const bool is_faster = is_cuda(parts_.backend) && weight->type == GGML_TYPE_BF16 &&
                           n >= fewest && n <= most && x->ne[2] * x->ne[3] == 1 &&
                           !takes_few_rows(parts_.backend, weight, n);
    return is_faster ? ggml_cast(nodes_.get(), x, GGML_TYPE_BF16) : x;
}

ggml_tensor * draft_graph::logits_of(ggml_tensor * states) const {
    ggml_tensor * head = parts_.weights.head != nullptr ? parts_.weights.head : parts_.target.head;
    const int64_t n = states->ne[1];
    ggml_tensor * logits = project(widened(nodes_.get(), parts_.backend, head, states), head);
    return first_columns(nodes_.get(), logits, n);
}

ggml_tensor * draft_graph::rope(ggml_tensor * x, ggml_tensor * positions) const {
    const rope_params & r = p_.rope;
    return ggml_rope_ext(nodes_.get(), x, positions, parts_.weights.rope_freqs, r.n_dims,
                         GGML_ROPE_TYPE_NEOX, r.n_ctx_orig, r.freq_base, r.freq_scale, r.ext_factor,
                         r.attn_factor, r.beta_fast, r.beta_slow);
}

// k: [head_dim, n_head_kv, n], normed and roped; v: [n_embd_kv, n].
void draft_graph::store(ggml_tensor * k_cache, ggml_tensor * v_cache, ggml_tensor * k,
                        ggml_tensor * v, ggml_tensor * cells) {
    ggml_context * c = nodes_.get();
    // A view, not a reshape: backends need it to rotate and store in one kernel.
    k = ggml_view_2d(c, k, p_.n_embd_kv(), k->ne[2], k->nb[2], 0);
    if (parts_.weights.has_large_values) {
        v = ggml_clamp(c, ggml_scale(c, ggml_cont(c, v), 1.0f / value_unit), -largest_value,
                       largest_value);
    }
    ggml_build_forward_expand(graph_, ggml_set_rows(c, k_cache, k, cells));
    ggml_build_forward_expand(graph_, ggml_set_rows(c, v_cache, v, cells));
}

ggml_tensor * draft_graph::context_features() {
    ggml_tensor * x = bucket.stored
                          ? ggml_get_rows(nodes_.get(), parts_.store->states, stored_cells_)
                          : features_;
    return norm(project(x, parts_.weights.fc, nullptr, true), parts_.weights.fc_norm);
}

// K and V of context features, [n_embd, n_rows], layer by layer.
void draft_graph::inject(ggml_tensor * g) {
    ggml_context * c = nodes_.get();
    const int64_t n = bucket.n_rows;
    ggml_tensor * positions = ggml_view_1d(c, row_positions_, n, 0);
    for (int i = 0; i < p_.n_layer; i++) {
        const draft_layer & l = parts_.weights.layers[i];
        ggml_tensor * k = project(g, l.attn_k, l.attn_k_bias);
        k = ggml_reshape_3d(c, k, p_.head_dim, p_.n_head_kv, n);
        ggml_tensor * v = values(l, g, k);
        k = rope(norm(k, l.attn_k_norm), positions);
        ggml_tensor * cells = ggml_view_1d(c, row_cells_, n, i * n * sizeof(int64_t));
        store(parts_.cache.all_k, parts_.cache.all_v, k, v, cells);
    }
}

// The same for all layers at once: a few kernel launches instead of a few per layer.
void draft_graph::inject_all(ggml_tensor * g) {
    ggml_context * c = nodes_.get();
    const draft_weights & w = parts_.weights;
    const int64_t n = bucket.n_rows;
    const int64_t width = p_.n_embd_kv();
    g = ggml_repeat_4d(c, g, p_.n_embd, n, p_.n_layer, 1);
    ggml_tensor * kv = project(g, w.all_kv, w.all_kv_bias);  // [2 width, n, n_layer]
    ggml_tensor * k = ggml_view_4d(c, kv, p_.head_dim, p_.n_head_kv, n, p_.n_layer,
                                   p_.head_dim * sizeof(float), kv->nb[1], kv->nb[2], 0);
    k = ggml_reshape_3d(c, norm(k, w.all_k_norm), p_.head_dim, p_.n_head_kv, n * p_.n_layer);
    ggml_tensor * v = ggml_view_2d(c, kv, width, n * p_.n_layer, kv->nb[1], width * sizeof(float));
    store(parts_.cache.all_k, parts_.cache.all_v, rope(k, row_positions_), v, row_cells_);
}

// Values, [n_embd_kv, n], of rows [n_embd, n] with these keys, [head_dim, n_head_kv, n], which are
// neither normed nor roped.
ggml_tensor * draft_graph::values(const draft_layer & l, ggml_tensor * x, ggml_tensor * k) const {
    if (l.attn_v != nullptr) {
        return project(x, l.attn_v, l.attn_v_bias, is_convolved());
    }
    ggml_tensor * v = ggml_rms_norm(nodes_.get(), k, p_.rms_eps);
    return ggml_reshape_2d(nodes_.get(), v, p_.n_embd_kv(), k->ne[2]);
}

// Queries of the block, [head_dim, n_head, block_size * n_streams], roped; its K and V go to the
// cache. h: [n_embd, block_size * n_streams].
ggml_tensor * draft_graph::queries(int layer, ggml_tensor * h) {
    ggml_context * c = nodes_.get();
    const draft_layer & l = parts_.weights.layers[layer];
    const int64_t n = h->ne[1];
    const int64_t n_q = static_cast<int64_t>(p_.head_dim) * p_.n_head;
    const int64_t n_kv = p_.n_embd_kv();
    ggml_tensor * q = nullptr;
    ggml_tensor * k = nullptr;
    ggml_tensor * v = nullptr;
    if (l.attn_qkv != nullptr) {
        ggml_tensor * qkv = project(h, l.attn_qkv, l.attn_qkv_bias, is_convolved());
        const size_t head = p_.head_dim * sizeof(float);
        q = ggml_view_3d(c, qkv, p_.head_dim, p_.n_head, n, head, qkv->nb[1], 0);
        k = ggml_view_3d(c, qkv, p_.head_dim, p_.n_head_kv, n, head, qkv->nb[1],
                         n_q * sizeof(float));
        v = ggml_view_2d(c, qkv, n_kv, n, qkv->nb[1], (n_q + n_kv) * sizeof(float));
    } else {
        q = project(h, l.attn_q, l.attn_q_bias, is_convolved());
        q = ggml_reshape_3d(c, q, p_.head_dim, p_.n_head, n);
        k = project(h, l.attn_k, l.attn_k_bias, is_convolved());
        k = ggml_reshape_3d(c, k, p_.head_dim, p_.n_head_kv, n);
        v = values(l, h, k);
    }
    q = rope(norm(q, l.attn_q_norm), block_positions_);
    k = rope(norm(k, l.attn_k_norm), block_positions_);
    store(parts_.cache.k[layer], parts_.cache.v[layer], k, v, block_cells_);
    return q;
}

// q: [head_dim, n_head, block_size * n_streams], roped. Returns [n_head * head_dim, same columns].
ggml_tensor * draft_graph::attention(int layer, ggml_tensor * q) {
    ggml_context * c = nodes_.get();
    const draft_cache & cache = parts_.cache;
    ggml_tensor * m = p_.is_sliding[layer] ? sliding_mask_ : mask_;
    ggml_tensor * k = cache.view(c, cache.k[layer], bucket.n_kv, bucket.n_streams);
    ggml_tensor * v = cache.view(c, cache.v[layer], bucket.n_kv, bucket.n_streams);
    q = ggml_reshape_4d(c, q, p_.head_dim, p_.n_head, p_.block_size, bucket.n_streams);
    q = ggml_permute(c, q, 0, 2, 1, 3);

    ggml_tensor * out = ggml_flash_attn_ext(c, q, k, v, m, p_.attention_scale, 0.0f, 0.0f);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    ggml_tensor * sinks = parts_.weights.layers[layer].attn_sinks;
    ggml_flash_attn_ext_add_sinks(out, sinks);
    if (!allowed_.flash_attention || !supports(parts_.backend, {out})) {
        ggml_tensor * scores = ggml_mul_mat(c, k, q);
        ggml_prec_set_acc(scores, GGML_PREC_F32);
        ggml_tensor * weights = ggml_soft_max_ext(c, scores, m, p_.attention_scale, 0.0f);
        ggml_soft_max_add_sinks(weights, sinks);
        ggml_tensor * vt = ggml_cont(c, ggml_permute(c, v, 1, 0, 2, 3));
        out = ggml_permute(c, ggml_mul_mat(c, vt, weights), 0, 2, 1, 3);
        out = ggml_cont(c, out);
    }
    return ggml_reshape_2d(c, out, static_cast<int64_t>(p_.head_dim) * p_.n_head,
                           static_cast<int64_t>(p_.block_size) * bucket.n_streams);
}

ggml_tensor * draft_graph::feed_forward(int layer, ggml_tensor * x) const {
    ggml_context * c = nodes_.get();
    const draft_layer & l = parts_.weights.layers[layer];
    ggml_tensor * h = nullptr;
    if (l.ffn_gate_up != nullptr) {
        ggml_tensor * both = project(x, l.ffn_gate_up, nullptr, is_convolved());
        h = p_.gelu ? ggml_geglu(c, both) : ggml_swiglu(c, both);
    } else {
        ggml_tensor * gate = project(x, l.ffn_gate, nullptr, is_convolved());
        ggml_tensor * up = project(x, l.ffn_up, nullptr, is_convolved());
        h = p_.gelu ? ggml_geglu_split(c, gate, up) : ggml_swiglu_split(c, gate, up);
    }
    return project(h, l.ffn_down, nullptr, true);
}

// h: [n_embd, block_size * n_streams], normed
ggml_tensor * draft_graph::self_attention(int layer, ggml_tensor * h) {
    const draft_layer & l = parts_.weights.layers[layer];
    ggml_tensor * x = attention(layer, queries(layer, h));
    float scale = parts_.weights.has_large_values ? value_unit : 1.0f;
    if (p_.value_scale != 0.0f) {
        scale *= p_.value_scale;
    }
    if (scale != 1.0f) {
        x = ggml_scale(nodes_.get(), x, scale);
    }
    return project(x, l.attn_output, l.attn_output_bias, true);
}

// A part of a layer, between its convolutions if it has any.
template <typename Part>
ggml_tensor * draft_graph::convolved(const conv_weights & weights, ggml_tensor * x,
                                     const Part & part) {
    if (weights.proj == nullptr) {
        return part(x);
    }
    const draft_conv conv(nodes_.get(), p_, weights.base, project(x, weights.proj));
    return conv.after(part(conv.before(x)));
}

// The output of the last layer, [n_embd, block_size * n_streams].
ggml_tensor * draft_graph::denoise() {
    ggml_context * c = nodes_.get();
    const int64_t n = static_cast<int64_t>(p_.block_size) * bucket.n_streams;
    ggml_tensor * x = ggml_reshape_2d(c, ggml_concat(c, anchors_, mask_rows_, 1), p_.n_embd, n);
    for (int i = 0; i < p_.n_layer; i++) {
        const draft_layer & l = parts_.weights.layers[i];
        ggml_tensor * h = convolved(l.attn_conv, norm(x, l.attn_norm),
                                    [&](ggml_tensor * in) { return self_attention(i, in); });
        if (l.attn_post_norm != nullptr) {
            h = norm(h, l.attn_post_norm);
        }
        x = ggml_add(c, h, x);
        h = convolved(l.ffn_conv, norm(x, l.ffn_norm),
                      [&](ggml_tensor * in) { return feed_forward(i, in); });
        if (l.ffn_post_norm != nullptr) {
            h = norm(h, l.ffn_post_norm);
        }
        x = ggml_add(c, h, x);
        if (l.output_scale != nullptr) {
            x = ggml_mul(c, x, l.output_scale);
        }
    }
    return x;
}

// What the head gets of x, [n_embd, block_size * n_streams]: the drafted positions of every block,
// normed. [n_embd, n_streams * n_draft], position by position
ggml_tensor * draft_graph::drafted_states(ggml_tensor * x) const {
    ggml_context * c = nodes_.get();
    const int64_t first = p_.from_anchor ? 0 : 1;  // else the anchor's output is not a draft
    const size_t column = p_.n_embd * sizeof(float);
    x = ggml_view_3d(c, x, p_.n_embd, bucket.n_streams, bucket.n_draft, column * p_.block_size,
                     column, column * first);
    x = ggml_cont_2d(c, x, p_.n_embd, static_cast<int64_t>(bucket.n_streams) * bucket.n_draft);
    return norm(x, parts_.weights.out_norm);
}

void draft_graph::build() {
    head_ = make_head(p_);
    const size_t n_nodes =
        (nodes_per_layer + nodes_per_tap * p_.selector.kernel_size) * (p_.n_layer + 1) +
        nodes_per_head + nodes_per_draft * bucket.n_draft;
    nodes_ = new_nodes(n_nodes);
    graph_ = ggml_new_graph_custom(nodes_.get(), n_nodes, false);
    ggml_tensor * g = context_features();
    // This goes first: weights that are views are nodes of all graphs, too.
    ggml_build_forward_expand(graph_, g);
    expand_views();
    if (parts_.weights.all_kv != nullptr) {
        inject_all(g);
    } else {
        inject(g);
    }
    if (bucket.n_streams > 0) {
        ggml_tensor * states = drafted_states(denoise());
        head_->build({nodes_.get(), graph_, parts_.backend, parts_.scratch, parts_.weights,
                      bucket.n_draft, bucket.n_streams, bucket.top_k, wanted_selection(),
                      n_rounds(), states, logits_of(states), anchor_rows_});
    }
    check_first_node();
}

// Backends join nodes that follow one another: norm, factor, rotation and store are one kernel of
// CUDA. A view of a weight between them would keep them apart.
void draft_graph::expand_views() {
    for (const draft_layer & l : parts_.weights.layers) {
        ggml_build_forward_expand(graph_, l.attn_k_norm);
    }
    if (parts_.weights.all_k_norm != nullptr) {
        ggml_build_forward_expand(graph_, parts_.weights.all_k_norm);
    }
}

bool draft_graph::is_on_host() const {
    const auto type = ggml_backend_dev_type(ggml_backend_get_device(parts_.backend));
    return type == GGML_BACKEND_DEVICE_TYPE_CPU;
}

selection draft_graph::wanted_selection() const {
    return !allowed_.top_k ? selection::on_host
           : is_on_host()  ? selection::among_few
                           : selection::on_device;
}

int draft_graph::n_rounds() const {
    const int on_device = bucket.n_streams < many_streams ? usual_rounds : rounds_of_many;
    const int usual = is_on_host() ? 0 : on_device;
    return std::min(allowed_.n_rounds > 0 ? allowed_.n_rounds : usual, bucket.n_draft);
}

// CUDA identifies the graphs that it has recorded by their first nodes. If two graphs shared one,
// each would be recorded again whenever the other one has run.
void draft_graph::check_first_node() const {
    const auto * begin = static_cast<const char *>(ggml_get_mem_buffer(nodes_.get()));
    const auto * node = reinterpret_cast<const char *>(ggml_graph_node(graph_, 0));
    if (node < begin || node >= begin + ggml_get_mem_size(nodes_.get())) {
        throw std::logic_error("the draft graph begins with a tensor that is not its own");
    }
}

void draft_graph::allocate() {
    ggml_backend_t backend = parts_.backend;
    for (int i = 0; i < ggml_graph_n_nodes(graph_); i++) {
        const ggml_tensor * node = ggml_graph_node(graph_, i);
        if (!supports(backend, {node})) {
            throw backend_error(std::string(ggml_backend_name(backend)) + " lacks " +
                                ggml_op_desc(node) + " for " + ggml_type_name(node->type) +
                                ", which the draft graph needs; load without a drafter");
        }
    }
    if (!parts_.scratch.allocate(graph_)) {
        refuse_room(backend, "the draft graph");
    }
}

void draft_graph::compute() {
    ggml_backend_t backend = parts_.backend;
    inputs_.upload(backend);
    start_graph(backend, graph_, "on the draft graph");
    if (bucket.n_streams == 0) {
        // From here on the inputs may be written again, and the target may overwrite its store.
        ggml_backend_synchronize(backend);
    }
}

}  // namespace dflash
