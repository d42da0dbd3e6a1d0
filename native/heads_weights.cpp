#include "heads_weights.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend.h"
#include "errors.h"
#include "private_abi.h"
#include "target_tensors.h"

namespace dflash {

namespace {

constexpr int largest_number = 1 << 20;  // of heads, dimensions, layers: no size overflows

void check_shape(const ggml_tensor * tensor, std::initializer_list<int64_t> shape) {
    std::array<int64_t, GGML_MAX_DIMS> expected{1, 1, 1, 1};
    std::copy(shape.begin(), shape.end(), expected.begin());
    if (!std::equal(expected.begin(), expected.end(), tensor->ne)) {
        throw file_error(std::string(tensor->name) +
                         " of the target's heads has not the shape that its keys say");
    }
}

}  // namespace

void heads_params::check() const {
    for (const int n : {layer, n_embd, n_head, n_head_kv, head_dim, n_draft}) {
        if (n < 1 || n > largest_number) {
            throw std::invalid_argument("a number of the target's heads is " + std::to_string(n));
        }
    }
    if (n_head % n_head_kv != 0 || rope.n_dims < 0 || rope.n_dims > head_dim ||
        rope.n_dims % 2 != 0 || n_expert_used < 0) {
        throw std::invalid_argument("the numbers of the target's heads contradict each other");
    }
}

heads_weights::heads_weights(const llama_model * model, const heads_params & given)
    : params(given) {
    params.check();
    bind(model);
    check_shapes();
}

// A tensor of the layer that is not known here would be left out of the graph.
void heads_weights::bind(const llama_model * model) {
    const target_tensors shared = target_tensors::find(model);
    device_ = shared.device();
    embedding = shared.embedding;
    head = shared.head;
    const std::string prefix = "blk." + std::to_string(params.layer) + ".";
    const bool is_mixture = params.n_expert_used > 0;
    const std::string ffn = is_mixture ? "_shexp.weight" : ".weight";
    std::map<std::string, ggml_tensor **> places = {
        {"nextn.eh_proj.weight", &joined},
        {"nextn.enorm.weight", &embedding_norm},
        {"nextn.hnorm.weight", &state_norm},
        {"nextn.embed_tokens.weight", &embedding},
        {"nextn.shared_head_head.weight", &head},
        {"nextn.shared_head_norm.weight", &head_norm},
        {"attn_norm.weight", &attn_norm},
        {"attn_q.weight", &attn_q},
        {"attn_k.weight", &attn_k},
        {"attn_v.weight", &attn_v},
        {"attn_q.bias", &attn_q_bias},
        {"attn_k.bias", &attn_k_bias},
        {"attn_v.bias", &attn_v_bias},
        {"attn_q_norm.weight", &attn_q_norm},
        {"attn_k_norm.weight", &attn_k_norm},
        {"attn_output.weight", &attn_output},
        {"post_attention_norm.weight", &post_norm},
        {"ffn_gate" + ffn, &ffn_gate},
        {"ffn_up" + ffn, &ffn_up},
        {"ffn_down" + ffn, &ffn_down},
    };
    if (is_mixture) {
        places["ffn_gate_inp.weight"] = &router;
        places["exp_probs_b.bias"] = &router_bias;
        places["ffn_gate_inp_shexp.weight"] = &shared_gate;
        places["ffn_gate_exps.weight"] = &experts_gate;
        places["ffn_up_exps.weight"] = &experts_up;
        places["ffn_down_exps.weight"] = &experts_down;
    }
    ggml_tensor * output_norm = nullptr;
    for (const auto & [name, tensor] : private_abi::tensors_of(model)) {
        if (name == "output_norm.weight") {
            output_norm = tensor;
        } else if (name == "output.scale") {
            throw file_error("the target's output head has a scale, which is not known here");
        } else if (name.compare(0, prefix.size(), prefix) == 0) {
            const auto found = places.find(name.substr(prefix.size()));
            if (found == places.end()) {
                throw file_error("the target's heads have " + name + ", which is not known here");
            }
            *found->second = tensor;
        }
    }
    if (head_norm == nullptr) {
        head_norm = output_norm;
    }
    const std::set<ggml_tensor **> optional = {&attn_q_bias, &attn_k_bias, &attn_v_bias,
                                               &attn_q_norm, &attn_k_norm, &router_bias,
                                               &shared_gate};
    const bool has_shared = ffn_up != nullptr;
    for (const auto & [name, place] : places) {
        const bool is_needed =
            optional.count(place) == 0 && (has_shared || name.find("_shexp") == std::string::npos);
        if (*place == nullptr && is_needed) {
            throw file_error("the target's heads lack " + prefix + name);
        }
    }
}

void heads_weights::check_shapes() const {
    const int64_t n = params.n_embd;
    const int64_t width = static_cast<int64_t>(params.head_dim) * params.n_head;
    for (const ggml_tensor * norm : {embedding_norm, state_norm, attn_norm, post_norm, head_norm}) {
        check_shape(norm, {n});
    }
    const auto check_optional = [](const ggml_tensor * tensor, int64_t size) {
        if (tensor != nullptr) {
            check_shape(tensor, {size});
        }
    };
    const int64_t n_q = params.is_gated ? 2 * width : width;
    check_optional(attn_q_norm, params.head_dim);
    check_optional(attn_k_norm, params.head_dim);
    check_optional(attn_q_bias, n_q);
    check_optional(attn_k_bias, params.n_embd_kv());
    check_optional(attn_v_bias, params.n_embd_kv());
    check_optional(shared_gate, n);
    check_shape(embedding, {n, embedding->ne[1]});
    check_shape(head, {n, head->ne[1]});
    check_shape(joined, {2 * n, n});
    check_shape(attn_q, {n, n_q});
    check_shape(attn_k, {n, params.n_embd_kv()});
    check_shape(attn_v, {n, params.n_embd_kv()});
    check_shape(attn_output, {width, n});
    if (ffn_up != nullptr) {
        const int64_t n_ff = ffn_up->ne[1];
        check_shape(ffn_gate, {n, n_ff});
        check_shape(ffn_up, {n, n_ff});
        check_shape(ffn_down, {n_ff, n});
    }
    if (router != nullptr) {
        const int64_t n_expert = router->ne[1];
        const int64_t n_ff = experts_up->ne[1];
        check_shape(router, {n, n_expert});
        check_shape(experts_gate, {n, n_ff, n_expert});
        check_shape(experts_up, {n, n_ff, n_expert});
        check_shape(experts_down, {n_ff, n, n_expert});
        if (params.n_expert_used > n_expert) {
            throw file_error("the target's heads use more experts than they have");
        }
        check_optional(router_bias, n_expert);
    }
    if (head->ne[1] < embedding->ne[1]) {
        throw file_error("the target's output head has fewer tokens than its embedding");
    }
}

void heads_weights::place(ggml_backend_t backend) {
    const auto is_there = [&](const ggml_tensor * tensor) {
        return tensor->buffer != nullptr &&
               ggml_backend_supports_buft(backend, ggml_backend_buffer_get_type(tensor->buffer));
    };
    for (const ggml_tensor * tensor :
         {embedding_norm, state_norm,  joined,       attn_norm,   attn_q,
          attn_k,         attn_v,      attn_q_bias,  attn_k_bias, attn_v_bias,
          attn_q_norm,    attn_k_norm, attn_output,  post_norm,   ffn_gate,
          ffn_up,         ffn_down,    router,       router_bias, shared_gate,
          experts_gate,   experts_up,  experts_down, head_norm,   head}) {
        if (tensor != nullptr && !is_there(tensor)) {
            throw backend_error(std::string(tensor->name) + " is not on " +
                                ggml_backend_dev_name(device_));
        }
    }
    const auto can_look_up = [&](ggml_tensor * table) {
        const ggml_context_ptr nodes = new_tensors(2);
        ggml_tensor * ids = ggml_new_tensor_1d(nodes.get(), GGML_TYPE_I32, 1);
        return supports(backend, {ggml_get_rows(nodes.get(), table, ids)});
    };
    const bool is_tied = std::string(head->name) == embedding->name;
    for (ggml_tensor * table : {embedding, is_tied ? head : embedding}) {
        if (is_there(table) && can_look_up(table)) {
            embedding = table;
            return;
        }
    }
    copies_ = new_tensors(1);
    ggml_tensor * copy =
        ggml_new_tensor_2d(copies_.get(), embedding->type, embedding->ne[0], embedding->ne[1]);
    if (!can_look_up(copy)) {
        throw backend_error(std::string(ggml_backend_name(backend)) +
                            " cannot look up embeddings of type " +
                            ggml_type_name(embedding->type));
    }
    buffer_.reset(ggml_backend_alloc_ctx_tensors(copies_.get(), backend));
    if (!buffer_) {
        refuse_room(backend, "the embeddings of the target's heads");
    }
    constexpr size_t most_bytes = size_t{16} << 20;  // on the host at once
    const size_t n_bytes = ggml_nbytes(embedding);
    std::vector<char> part(std::min(n_bytes, most_bytes));
    for (size_t at = 0; at < n_bytes; at += part.size()) {
        const size_t n = std::min(part.size(), n_bytes - at);
        ggml_backend_tensor_get(embedding, part.data(), at, n);
        ggml_backend_tensor_set(copy, part.data(), at, n);
    }
    embedding = copy;
}

}  // namespace dflash
