#include "draft_weights.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "errors.h"

namespace dflash {

namespace {

constexpr size_t read_chunk = size_t{32} << 20;

constexpr const char * embedding_name = "token_embd.weight";
constexpr const char * head_name = "output.weight";

std::string shape_text(const int64_t * ne, size_t n) {
    std::string text = "[";
    for (size_t i = 0; i < n; i++) {
        text += (i > 0 ? ", " : "") + std::to_string(ne[i]);
    }
    return text + "]";
}

// Types that only hold whole numbers, or only activations on their way through a product, are not
// for weights; backends do not check, and crash. Norms and factors are floats in every product.
void check_type(const ggml_tensor * tensor, bool is_matrix) {
    const bool is_weight = is_matrix && ggml_get_type_traits(tensor->type)->to_float != nullptr;
    if (tensor->type != GGML_TYPE_F32 && !is_weight) {
        throw file_error("tensor " + std::string(tensor->name) + " of the drafter is of type " +
                         ggml_type_name(tensor->type) + ", expected " +
                         (is_matrix ? "a type of weights" : "f32") + "; convert it again");
    }
}

ggml_backend_buffer_ptr allocate(ggml_context * tensors, ggml_backend_buffer_type_t type) {
    if (ggml_get_first_tensor(tensors) == nullptr) {
        return nullptr;
    }
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(tensors, type));
    if (!buffer) {
        throw backend_error(std::string("no room for the drafter's weights on ") +
                            ggml_backend_buft_name(type));
    }
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    return buffer;
}

}  // namespace

draft_weights::draft_weights(const std::string & path, ggml_backend_dev_t device) {
    ggml_context * raw = nullptr;
    const gguf_context_ptr gguf(gguf_init_from_file(path.c_str(), {/*no_alloc=*/true, &raw}));
    const ggml_context_ptr file(raw);
    if (!gguf) {
        throw file_error(path + " is not a GGUF file that ggml can read");
    }
    params = draft_params::read(gguf.get());
    create(file.get(), gguf.get());
    bind();
    check_data(path, gguf.get());
    device_buffer_ = allocate(device_tensors_.get(), ggml_backend_dev_buffer_type(device));
    host_buffer_ = allocate(
        host_tensors_.get(),
        ggml_backend_dev_buffer_type(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)));
    read(path, gguf.get());
}

size_t draft_weights::n_bytes() const {
    return device_buffer_ ? ggml_backend_buffer_get_size(device_buffer_.get()) : 0;
}

void draft_weights::create(const ggml_context * file, const gguf_context * gguf) {
    const int64_t n = gguf_get_n_tensors(gguf);
    const ggml_init_params init = {ggml_tensor_overhead() * (n + 2), nullptr, /*no_alloc=*/true};
    device_tensors_.reset(ggml_init(init));
    host_tensors_.reset(ggml_init(init));
    for (int64_t i = 0; i < n; i++) {
        const std::string name = gguf_get_tensor_name(gguf, i);
        const ggml_tensor * shape = ggml_get_tensor(const_cast<ggml_context *>(file), name.c_str());
        // Of the embedding only single rows are read, on the host.
        const bool on_host = name == embedding_name;
        add(on_host ? host_tensors_.get() : device_tensors_.get(), shape, name);
        sources_[name] = i;
    }
    const auto tied = sources_.find(embedding_name);
    if (tied != sources_.end() && sources_.count(head_name) == 0) {
        add(device_tensors_.get(), unbound_.at(embedding_name), head_name);
        sources_[head_name] = tied->second;
    }
}

void draft_weights::add(ggml_context * home, const ggml_tensor * shape, const std::string & name) {
    ggml_tensor * tensor = ggml_dup_tensor(home, shape);
    ggml_set_name(tensor, name.c_str());
    if (!unbound_.emplace(name, tensor).second) {
        throw file_error("the drafter has two tensors " + name + "; convert it again");
    }
}

ggml_tensor * draft_weights::take(const std::string & name, std::vector<int64_t> shape,
                                  bool required) {
    const auto it = unbound_.find(name);
    if (it == unbound_.end()) {
        if (required) {
            throw file_error("the drafter has no tensor " + name + "; convert it again");
        }
        return nullptr;
    }
    ggml_tensor * tensor = it->second;
    unbound_.erase(it);
    for (size_t i = 0; i < GGML_MAX_DIMS; i++) {
        const int64_t expected = i < shape.size() ? shape[i] : 1;
        const bool fits = expected < 0 ? tensor->ne[i] > 0 : tensor->ne[i] == expected;  // -1: any
        if (!fits) {
            throw file_error("tensor " + name + " of the drafter has the shape " +
                             shape_text(tensor->ne, shape.size()) + ", expected " +
                             shape_text(shape.data(), shape.size()));
        }
    }
    check_type(tensor, shape.size() > 1);
    return tensor;
}

void draft_weights::bind() {
    const int64_t d = params.n_embd;
    const int64_t hd = params.head_dim;
    const int64_t q = hd * params.n_head;
    const int64_t kv = params.n_embd_kv();
    fc = take("fc.weight", {params.n_features(), d});
    fc_norm = take("enc.output_norm.weight", {d});
    out_norm = take("output_norm.weight", {d});
    embedding = take(embedding_name, {d, -1}, false);
    head = take(head_name, {d, -1}, false);
    rope_freqs = take("rope_freqs.weight", {params.rope.n_dims / 2}, false);
    layers.resize(params.n_layer);
    for (int i = 0; i < params.n_layer; i++) {
        draft_layer & l = layers[i];
        const std::string b = "blk." + std::to_string(i) + ".";
        l.attn_norm = take(b + "attn_norm.weight", {d});
        l.attn_q = take(b + "attn_q.weight", {d, q});
        l.attn_k = take(b + "attn_k.weight", {d, kv});
        l.attn_v = take(b + "attn_v.weight", {d, kv});
        l.attn_output = take(b + "attn_output.weight", {q, d});
        l.attn_q_bias = take(b + "attn_q.bias", {q}, false);
        l.attn_k_bias = take(b + "attn_k.bias", {kv}, false);
        l.attn_v_bias = take(b + "attn_v.bias", {kv}, false);
        l.attn_output_bias = take(b + "attn_output.bias", {d}, false);
        l.attn_q_norm = take(b + "attn_q_norm.weight", {hd});
        l.attn_k_norm = take(b + "attn_k_norm.weight", {hd});
        l.attn_post_norm = take(b + "post_attention_norm.weight", {d}, false);
        l.ffn_norm = take(b + "ffn_norm.weight", {d});
        l.ffn_gate = take(b + "ffn_gate.weight", {d, -1});
        const int64_t ff = l.ffn_gate->ne[1];
        l.ffn_up = take(b + "ffn_up.weight", {d, ff});
        l.ffn_down = take(b + "ffn_down.weight", {ff, d});
        l.ffn_post_norm = take(b + "post_ffw_norm.weight", {d}, false);
        l.output_scale = take(b + "layer_output_scale.weight", {1}, false);
    }
    if (!unbound_.empty()) {
        throw file_error("the draft graph does not know tensor " + unbound_.begin()->first + " (" +
                         std::to_string(unbound_.size()) +
                         " such): this drafter is of another kind than plain DFlash");
    }
}

// Before memory is taken: a few bytes can claim any size.
void draft_weights::check_data(const std::string & path, const gguf_context * gguf) const {
    std::error_code error;
    const std::uintmax_t n_file = std::filesystem::file_size(std::filesystem::u8path(path), error);
    for (const auto & [name, i] : sources_) {
        const std::uintmax_t end = gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, i) +
                                   gguf_get_tensor_size(gguf, i);
        if (error || end > n_file) {
            throw file_error(path + " ends inside tensor " + name + "; fetch it again");
        }
    }
}

void draft_weights::read(const std::string & path, const gguf_context * gguf) {
    std::ifstream file(std::filesystem::u8path(path), std::ios::binary);
    std::vector<char> chunk;
    for (const auto & [name, i] : sources_) {
        ggml_tensor * tensor = ggml_get_tensor(device_tensors_.get(), name.c_str());
        if (tensor == nullptr) {
            tensor = ggml_get_tensor(host_tensors_.get(), name.c_str());
        }
        const size_t n = ggml_nbytes(tensor);
        file.seekg(static_cast<std::streamoff>(gguf_get_data_offset(gguf) +
                                               gguf_get_tensor_offset(gguf, i)));
        for (size_t done = 0; done < n; done += chunk.size()) {
            chunk.resize(std::min(read_chunk, n - done));
            if (!file.read(chunk.data(), static_cast<std::streamsize>(chunk.size()))) {
                throw file_error(path + " ends inside tensor " + name + "; fetch it again");
            }
            ggml_backend_tensor_set(tensor, chunk.data(), done, chunk.size());
        }
    }
}

}  // namespace dflash
