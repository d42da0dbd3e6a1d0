#include "heads_graph.h"

#include <cmath>
#include <string>
#include <vector>

#include "backend.h"
#include "chunks.h"
#include "errors.h"
#include "wide_product.h"

namespace dflash {

namespace {

constexpr size_t nodes_of_rows = 64;   // more than are built
constexpr size_t nodes_of_step = 128;  // without a view and a sum for each expert
// The least sum of the weights of a token's experts, as llama.cpp has it: the least f16.
constexpr float least_sum = 6.103515625e-5f;
constexpr float largest = 1e38f;

}  // namespace

heads_graph::heads_graph(const heads_parts & parts, const heads_bucket & size)
    : bucket(size), parts_(parts), p_(parts.weights.params) {
    create_inputs();
    build();
    allocate();
}

void heads_graph::create_inputs() {
    const int64_t n_firsts = bucket.n_firsts();
    tokens_ = inputs_.add(GGML_TYPE_I32, {bucket.n_read()});
    stored_cells_ = inputs_.add(GGML_TYPE_I32, {bucket.n_read()});
    first_rows_ = inputs_.add(GGML_TYPE_I64, {n_firsts});
    first_seqs_ = inputs_.add(GGML_TYPE_I32, {n_firsts});
    last_cells_ = inputs_.add(GGML_TYPE_I32, {n_firsts});
    last_seqs_ = inputs_.add(GGML_TYPE_I64, {n_firsts});
    positions_ = inputs_.add(GGML_TYPE_I32, {bucket.n_all()});
    cells_ = inputs_.add(GGML_TYPE_I64, {bucket.n_all()});
    if (bucket.n_streams > 0) {
        const int64_t n = static_cast<int64_t>(bucket.n_streams) * bucket.n_draft;
        mask_ = inputs_.add(GGML_TYPE_F16, {bucket.n_kv, n});
    }
    inputs_.place(parts_.backend);
}

ggml_tensor * heads_graph::norm(ggml_tensor * x, ggml_tensor * weight) const {
    return weight == nullptr
               ? x
               : ggml_mul(nodes_.get(), ggml_rms_norm(nodes_.get(), x, p_.rms_eps), weight);
}

ggml_tensor * heads_graph::product(ggml_tensor * weight, ggml_tensor * x,
                                   ggml_tensor * bias) const {
    ggml_tensor * wide = widened(nodes_.get(), parts_.backend, weight, x);
    ggml_tensor * y =
        first_columns(nodes_.get(), ggml_mul_mat(nodes_.get(), weight, wide), x->ne[1]);
    return bias != nullptr ? ggml_add(nodes_.get(), y, bias) : y;
}

// x: [head_dim, heads, n], at the positions from `first` on.
ggml_tensor * heads_graph::rope(ggml_tensor * x, int first) const {
    const rope_params & r = p_.rope;
    ggml_tensor * positions =
        ggml_view_1d(nodes_.get(), positions_, x->ne[2], first * sizeof(int32_t));
    // Not between a norm and its rotation: backends join nodes that follow one another.
    ggml_build_forward_expand(graph_, positions);
    return ggml_rope_ext(nodes_.get(), x, positions, nullptr, r.n_dims, GGML_ROPE_TYPE_NEOX,
                         r.n_ctx_orig, r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor,
                         r.beta_fast, r.beta_slow);
}

// The target's states before the rows that read them, [n_embd, n_read]. Most are in its store; that
// before the first new row of a sequence was kept.
ggml_tensor * heads_graph::states_before() {
    ggml_context * c = nodes_.get();
    ggml_tensor * states = ggml_get_rows(c, parts_.store.states, stored_cells_);
    ggml_tensor * kept = ggml_get_rows(c, parts_.kept, first_seqs_);
    states = ggml_set_rows(c, states, kept, first_rows_);
    ggml_build_forward_expand(graph_, states);
    ggml_tensor * last = ggml_get_rows(c, parts_.store.states, last_cells_);
    ggml_build_forward_expand(graph_, ggml_set_rows(c, parts_.kept, last, last_seqs_));
    return states;
}

// What enters the layer, [n_embd, n], of tokens and the states before them.
ggml_tensor * heads_graph::joined(ggml_tensor * ids, ggml_tensor * states) const {
    ggml_context * c = nodes_.get();
    const heads_weights & w = parts_.weights;
    ggml_tensor * embedded = norm(ggml_get_rows(c, w.embedding, ids), w.embedding_norm);
    return product(w.joined, ggml_concat(c, embedded, norm(states, w.state_norm), 0));
}

// Keys and values of rows, [n_embd, n], normed, to the cells from `first` on.
void heads_graph::store(ggml_tensor * x, int first) {
    ggml_context * c = nodes_.get();
    const heads_weights & w = parts_.weights;
    const int64_t n = x->ne[1];
    ggml_tensor * cells = ggml_view_1d(c, cells_, n, first * sizeof(int64_t));
    ggml_build_forward_expand(graph_, cells);
    ggml_tensor * k = product(w.attn_k, x, w.attn_k_bias);
    ggml_tensor * v = product(w.attn_v, x, w.attn_v_bias);
    ggml_build_forward_expand(graph_, k);
    ggml_build_forward_expand(graph_, v);
    k = ggml_reshape_3d(c, k, p_.head_dim, p_.n_head_kv, n);
    k = rope(norm(k, w.attn_k_norm), first);
    // A view, not a reshape: backends need it to rotate and store in one kernel.
    k = ggml_view_2d(c, k, p_.n_embd_kv(), n, k->nb[2], 0);
    ggml_build_forward_expand(graph_, ggml_set_rows(c, parts_.cache.k[0], k, cells));
    ggml_build_forward_expand(graph_, ggml_set_rows(c, parts_.cache.v[0], v, cells));
}

// both: queries, and their gates if there are any, of rows at the positions from `first` on, whose
// cells are filled.
ggml_tensor * heads_graph::attention(int step, ggml_tensor * both, int first) {
    ggml_context * c = nodes_.get();
    const heads_weights & w = parts_.weights;
    const draft_cache & cache = parts_.cache;
    const int64_t n = bucket.n_streams;
    const int64_t width = static_cast<int64_t>(p_.head_dim) * p_.n_head;
    const size_t head = (p_.is_gated ? 2 : 1) * p_.head_dim * sizeof(float);
    ggml_tensor * q = ggml_view_3d(c, both, p_.head_dim, p_.n_head, n, head, head * p_.n_head, 0);
    q = rope(norm(q, w.attn_q_norm), first);
    q = ggml_permute(c, ggml_reshape_4d(c, q, p_.head_dim, p_.n_head, 1, n), 0, 2, 1, 3);

    const size_t row = bucket.n_kv * sizeof(ggml_fp16_t);
    ggml_tensor * mask =
        ggml_view_4d(c, mask_, bucket.n_kv, 1, 1, n, row, row, row, step * n * row);
    ggml_tensor * k = cache.view(c, cache.k[0], bucket.n_kv, bucket.n_streams);
    ggml_tensor * v = cache.view(c, cache.v[0], bucket.n_kv, bucket.n_streams);
    const float scale = 1.0f / std::sqrt(static_cast<float>(p_.head_dim));
    ggml_tensor * out = ggml_flash_attn_ext(c, q, k, v, mask, scale, 0.0f, 0.0f);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    if (!supports(parts_.backend, {out})) {
        ggml_tensor * scores = ggml_mul_mat(c, k, q);
        ggml_prec_set_acc(scores, GGML_PREC_F32);
        ggml_tensor * weights = ggml_soft_max_ext(c, scores, mask, scale, 0.0f);
        ggml_tensor * vt = ggml_cont(c, ggml_permute(c, v, 1, 0, 2, 3));
        out = ggml_cont(c, ggml_permute(c, ggml_mul_mat(c, vt, weights), 0, 2, 1, 3));
    }
    out = ggml_reshape_2d(c, out, width, n);
    if (p_.is_gated) {
        ggml_tensor * gate = ggml_view_3d(c, both, p_.head_dim, p_.n_head, n, head,
                                          head * p_.n_head, p_.head_dim * sizeof(float));
        out = ggml_mul(c, out, ggml_sigmoid(c, ggml_cont_2d(c, gate, width, n)));
    }
    return product(w.attn_output, out);
}

// x: [n_embd, n_streams], normed
ggml_tensor * heads_graph::feed_forward(ggml_tensor * x) const {
    ggml_context * c = nodes_.get();
    const heads_weights & w = parts_.weights;
    ggml_tensor * of_experts = w.router != nullptr ? experts(x) : nullptr;
    if (w.ffn_up == nullptr) {
        return of_experts;
    }
    ggml_tensor * h = ggml_swiglu_split(c, product(w.ffn_gate, x), product(w.ffn_up, x));
    ggml_tensor * y = product(w.ffn_down, h);
    if (of_experts == nullptr) {
        return y;
    }
    if (w.shared_gate != nullptr) {
        y = ggml_mul(c, y, ggml_sigmoid(c, ggml_mul_mat(c, w.shared_gate, x)));
    }
    return ggml_add(c, of_experts, y);
}

// The best experts of each row, weighed by their share of the probability.
ggml_tensor * heads_graph::experts(ggml_tensor * x) const {
    ggml_context * c = nodes_.get();
    const heads_weights & w = parts_.weights;
    const int64_t n = x->ne[1];
    const int64_t n_used = p_.n_expert_used;
    ggml_tensor * chances = ggml_mul_mat(c, w.router, x);
    chances = p_.by_sigmoid ? ggml_sigmoid(c, chances) : ggml_soft_max(c, chances);
    ggml_tensor * liked = w.router_bias != nullptr ? ggml_add(c, chances, w.router_bias) : chances;
    ggml_tensor * chosen = ggml_argsort_top_k(c, liked, static_cast<int>(n_used));
    ggml_tensor * weights =
        ggml_get_rows(c, ggml_reshape_3d(c, chances, 1, w.router->ne[1], n), chosen);
    if (p_.adds_to_one) {
        weights = ggml_reshape_2d(c, weights, n_used, n);
        ggml_tensor * sum = ggml_clamp(c, ggml_sum_rows(c, weights), least_sum, INFINITY);
        weights = ggml_reshape_3d(c, ggml_div(c, weights, sum), 1, n_used, n);
    }
    if (p_.expert_scale != 0.0f && p_.expert_scale != 1.0f) {
        weights = ggml_scale(c, weights, p_.expert_scale);
    }
    ggml_build_forward_expand(graph_, weights);  // next to the choice, so that backends join both
    ggml_tensor * rows = ggml_reshape_3d(c, x, p_.n_embd, 1, n);
    ggml_tensor * up = ggml_mul_mat_id(c, w.experts_up, rows, chosen);
    ggml_tensor * gate = ggml_mul_mat_id(c, w.experts_gate, rows, chosen);
    ggml_tensor * each = ggml_swiglu_split(c, gate, up);
    each = ggml_mul(c, ggml_mul_mat_id(c, w.experts_down, each, chosen), weights);
    ggml_tensor * total = nullptr;
    for (int64_t i = 0; i < n_used; i++) {
        ggml_tensor * one = ggml_view_2d(c, each, p_.n_embd, n, each->nb[2], i * each->nb[1]);
        total = total == nullptr ? one : ggml_add(c, total, one);
    }
    return n_used == 1 ? ggml_cont(c, total) : total;
}

// The best token of each row of logits, i32 [n_streams].
ggml_tensor * heads_graph::best(ggml_tensor * logits) {
    ggml_context * c = nodes_.get();
    const int64_t n_vocab = logits->ne[0];
    const int64_t n = logits->ne[1];
    // In chunks, which keep all of a device busy. Where values are not numbers, some backends say
    // that -1 is the best, and there is no such row to look up.
    const int64_t size = parts_.ids->ne[0];
    ggml_tensor * numbers = ggml_clamp(c, logits, -largest, largest);
    const best_place best = find_place(c, parts_.backend, numbers, size);
    ggml_tensor * ids = ggml_get_rows(c, parts_.ids, best.chunks);
    ids = ggml_get_rows(c, ggml_reshape_3d(c, ids, 1, size, n),
                        ggml_reshape_2d(c, best.places, 1, n));
    ids = ggml_reshape_1d(c, ids, n);
    ggml_tensor * peak =
        ggml_get_rows(c, ggml_reshape_3d(c, logits, 1, n_vocab, n), ggml_reshape_2d(c, ids, 1, n));
    ggml_tensor * parts = ggml_reshape_3d(c, logits, size, n_vocab / size, n);
    parts = ggml_exp(c, ggml_sub(c, parts, peak));
    parts = ggml_reshape_2d(c, ggml_sum_rows(c, parts), n_vocab / size, n);
    ids_.push_back(ids);
    sums_.push_back(ggml_sum_rows(c, parts));
    return ids;
}

// x: what enters the layer of the anchors, [n_embd, n_streams]; their cells are filled.
void heads_graph::draft(ggml_tensor * x) {
    ggml_context * c = nodes_.get();
    const heads_weights & w = parts_.weights;
    ggml_tensor * ids = nullptr;
    ggml_tensor * state = nullptr;
    for (int step = 0; step < bucket.n_draft; step++) {
        const int first = bucket.n_rows + step * bucket.n_streams;
        if (step > 0) {
            x = joined(ids, state);
        }
        ggml_tensor * normed = norm(x, w.attn_norm);
        // Before keys and values, so that backends can make one launch of the three products.
        ggml_tensor * queries = product(w.attn_q, normed, w.attn_q_bias);
        ggml_build_forward_expand(graph_, queries);
        if (step > 0) {
            store(normed, first);
        }
        x = ggml_add(c, attention(step, queries, first), x);
        x = ggml_add(c, feed_forward(norm(x, w.post_norm)), x);
        state = norm(x, w.head_norm);
        ids = best(product(w.head, state));
        ggml_build_forward_expand(graph_, ids);
        ggml_build_forward_expand(graph_, sums_.back());
    }
}

void heads_graph::build() {
    const size_t n_nodes = nodes_of_rows + bucket.n_draft * (nodes_of_step + 2 * p_.n_expert_used);
    nodes_ = new_nodes(n_nodes);
    ggml_context * c = nodes_.get();
    graph_ = ggml_new_graph_custom(c, n_nodes, false);
    ggml_tensor * x = joined(tokens_, states_before());
    store(norm(x, parts_.weights.attn_norm), 0);
    if (bucket.n_streams == 0) {
        return;
    }
    if (bucket.n_rows > 0) {
        x = ggml_view_2d(c, x, p_.n_embd, bucket.n_streams, x->nb[1], bucket.n_rows * x->nb[1]);
    }
    draft(x);
    std::vector<ggml_tensor *> results = ids_;
    results.insert(results.end(), sums_.begin(), sums_.end());
    results_.place(parts_.backend, graph_, results);
}

void heads_graph::allocate() {
    for (int i = 0; i < ggml_graph_n_nodes(graph_); i++) {
        const ggml_tensor * node = ggml_graph_node(graph_, i);
        if (!supports(parts_.backend, {node})) {
            throw backend_error(std::string(ggml_backend_name(parts_.backend)) + " lacks " +
                                ggml_op_desc(node) + " for " + ggml_type_name(node->type));
        }
    }
    if (!parts_.scratch.allocate(graph_)) {
        refuse_room(parts_.backend, "the graph of the target's heads");
    }
}

void heads_graph::compute() {
    inputs_.upload(parts_.backend);
    start_graph(parts_.backend, graph_, "on the graph of the target's heads");
    results_.fetch(parts_.backend);
}

void heads_graph::read(int step, int stream, int32_t * id, float * logprob) const {
    const float sum = results_.of<float>(sums_[step])[stream];
    check_numbers(&sum, 1);
    *id = results_.of<int32_t>(ids_[step])[stream];
    *logprob = -std::log(sum);
}

}  // namespace dflash
