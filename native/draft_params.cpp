#include "draft_params.h"

#include <cmath>
#include <string>

#include "errors.h"

namespace dflash {

namespace {

constexpr const char * arch = "dflash";

class keys {
  public:
    explicit keys(const gguf_context * gguf) : gguf_(gguf) {}

    int integer(const std::string & key) const { return integer_at(find(key), key); }

    int integer(const std::string & key, int fallback) const {
        const int64_t id = gguf_find_key(gguf_, key.c_str());
        return id < 0 ? fallback : integer_at(id, key);
    }

    float real(const std::string & key) const { return real_at(find(key), key); }

    float real(const std::string & key, float fallback) const {
        const int64_t id = gguf_find_key(gguf_, key.c_str());
        return id < 0 ? fallback : real_at(id, key);
    }

    std::string text(const std::string & key, const std::string & fallback) const {
        const int64_t id = gguf_find_key(gguf_, key.c_str());
        if (id < 0) {
            return fallback;
        }
        check(gguf_get_kv_type(gguf_, id) == GGUF_TYPE_STRING, key, "a string");
        return gguf_get_val_str(gguf_, id);
    }

    std::vector<int32_t> integers(const std::string & key) const {
        const int64_t id = find(key);
        check(gguf_get_kv_type(gguf_, id) == GGUF_TYPE_ARRAY, key, "an array of integers");
        const gguf_type type = gguf_get_arr_type(gguf_, id);
        check(type == GGUF_TYPE_INT32 || type == GGUF_TYPE_UINT32, key, "an array of integers");
        const auto * data = static_cast<const int32_t *>(gguf_get_arr_data(gguf_, id));
        return {data, data + gguf_get_arr_n(gguf_, id)};
    }

    // One flag per layer; a file with a window but no pattern has it in every layer.
    std::vector<bool> flags(const std::string & key, int n, bool fallback) const {
        const int64_t id = gguf_find_key(gguf_, key.c_str());
        if (id < 0) {
            return std::vector<bool>(n, fallback);
        }
        check(gguf_get_kv_type(gguf_, id) == GGUF_TYPE_ARRAY &&
                  gguf_get_arr_type(gguf_, id) == GGUF_TYPE_BOOL &&
                  gguf_get_arr_n(gguf_, id) == static_cast<size_t>(n),
              key, "an array of " + std::to_string(n) + " booleans");
        const auto * data = static_cast<const int8_t *>(gguf_get_arr_data(gguf_, id));
        std::vector<bool> out(n);
        for (int i = 0; i < n; i++) {
            out[i] = data[i] != 0;
        }
        return out;
    }

  private:
    int64_t find(const std::string & key) const {
        const int64_t id = gguf_find_key(gguf_, key.c_str());
        if (id < 0) {
            throw file_error("the drafter has no key " + key + "; convert it again");
        }
        return id;
    }

    int integer_at(int64_t id, const std::string & key) const {
        switch (gguf_get_kv_type(gguf_, id)) {
            case GGUF_TYPE_UINT32: return static_cast<int>(gguf_get_val_u32(gguf_, id));
            case GGUF_TYPE_INT32: return gguf_get_val_i32(gguf_, id);
            default: check(false, key, "an integer"); return 0;
        }
    }

    float real_at(int64_t id, const std::string & key) const {
        check(gguf_get_kv_type(gguf_, id) == GGUF_TYPE_FLOAT32, key, "a float");
        return gguf_get_val_f32(gguf_, id);
    }

    static void check(bool ok, const std::string & key, const std::string & expected) {
        if (!ok) {
            throw file_error("key " + key + " of the drafter is not " + expected);
        }
    }

    const gguf_context * gguf_;
};

rope_params read_rope(const keys & k, const std::string & p, int head_dim) {
    rope_params rope;
    rope.n_dims = k.integer(p + "rope.dimension_count", head_dim);
    rope.freq_base = k.real(p + "rope.freq_base", 10000.0f);
    rope.n_ctx_orig = k.integer(p + "rope.scaling.original_context_length",
                                k.integer(p + "context_length", 0));
    const std::string scaling = k.text(p + "rope.scaling.type", "linear");
    const float factor = k.real(p + "rope.scaling.factor", 0.0f);
    if (scaling == "none" || factor == 0.0f) {
        return rope;
    }
    if (scaling != "linear" && scaling != "yarn") {
        throw file_error("RoPE scaling '" + scaling + "' of the drafter is not known; "
                         "known are none, linear and yarn");
    }
    rope.freq_scale = 1.0f / factor;
    rope.attn_factor = k.real(p + "rope.scaling.attn_factor", 1.0f);
    // llama.cpp reads no other YaRN key for this architecture.
    rope.ext_factor = scaling == "yarn" ? 1.0f : 0.0f;
    return rope;
}

}  // namespace

draft_params draft_params::read(const gguf_context * gguf) {
    const keys k(gguf);
    const std::string found = k.text("general.architecture", "");
    if (found != arch) {
        throw file_error("architecture '" + found + "' is not a drafter; expected 'dflash'");
    }
    const std::string p = std::string(arch) + ".";
    draft_params params;
    params.n_embd = k.integer(p + "embedding_length");
    params.n_layer = k.integer(p + "block_count");
    params.n_head = k.integer(p + "attention.head_count");
    params.n_head_kv = k.integer(p + "attention.head_count_kv", params.n_head);
    if (params.n_embd <= 0 || params.n_layer <= 0 || params.n_head <= 0 || params.n_head_kv <= 0 ||
        params.n_head % params.n_head_kv != 0) {
        throw file_error("the drafter's dimensions are not positive, or its heads do not divide");
    }
    params.head_dim = k.integer(p + "attention.key_length", params.n_embd / params.n_head);
    params.block_size = k.integer(p + "block_size");
    if (params.block_size < 2) {
        throw file_error("block size " + std::to_string(params.block_size) +
                         " of the drafter leaves nothing to draft; expected 2 or more");
    }
    params.mask_token = k.integer("tokenizer.ggml.mask_token_id");
    params.target_layers = k.integers(p + "target_layers");
    if (params.target_layers.empty()) {
        throw file_error("key dflash.target_layers of the drafter is empty");
    }
    params.rms_eps = k.real(p + "attention.layer_norm_rms_epsilon");
    params.sliding_window = k.integer(p + "attention.sliding_window", 0);
    params.is_sliding = k.flags(p + "attention.sliding_window_pattern", params.n_layer,
                                params.sliding_window > 0);
    if (params.sliding_window <= 0) {
        params.is_sliding.assign(params.n_layer, false);
    }
    params.attention_scale = k.real(p + "attention.scale", 0.0f);
    if (params.attention_scale == 0.0f) {
        params.attention_scale = 1.0f / std::sqrt(static_cast<float>(params.head_dim));
    }
    params.value_scale = k.real(p + "attention.value_scale", 0.0f);
    const float scale = k.real(p + "embedding_scale", 0.0f);
    params.embedding_scale = scale == 0.0f ? 1.0f : scale;
    const std::string act = k.text(p + "hidden_activation", "silu");
    params.gelu = act == "gelu" || act == "gelu_pytorch_tanh";
    if (!params.gelu && act != "silu") {
        throw file_error("activation '" + act + "' of the drafter is not known; "
                         "known are silu and gelu");
    }
    params.rope = read_rope(k, p, params.head_dim);
    return params;
}

}  // namespace dflash
