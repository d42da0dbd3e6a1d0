#include "draft_params.h"

#include <cmath>
#include <limits>
#include <string>

#include "errors.h"

namespace dflash {

namespace {

constexpr const char * arch = "dflash";

struct range {
    int low;
    int high;
};

// Well beyond any drafter, and small enough that no product of them overflows.
constexpr range width_range = {1, 1 << 20};
constexpr range layer_range = {1, 1 << 10};
constexpr range head_range = {1, 1 << 14};
constexpr range block_range = {2, 1 << 10};
constexpr range any_count = {0, std::numeric_limits<int>::max()};
constexpr size_t most_taps = 1 << 10;

class keys {
  public:
    explicit keys(const gguf_context * gguf) : gguf_(gguf) {}

    int integer(const std::string & key, range allowed) const {
        return within(integer_at(find(key), key), key, allowed);
    }

    int integer(const std::string & key, range allowed, int fallback) const {
        const int64_t id = gguf_find_key(gguf_, key.c_str());
        return within(id < 0 ? fallback : integer_at(id, key), key, allowed);
    }

    float real(const std::string & key) const { return real_at(find(key), key); }

    float real(const std::string & key, float fallback) const {
        const int64_t id = gguf_find_key(gguf_, key.c_str());
        return id < 0 ? fallback : real_at(id, key);
    }

    float positive(const std::string & key, float value) const {
        if (value <= 0.0f) {
            throw file_error("key " + key + " of the drafter is " + std::to_string(value) +
                             ", expected more than 0; convert it again");
        }
        return value;
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
        check(gguf_get_arr_n(gguf_, id) <= most_taps, key, "a short array");
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

    int64_t integer_at(int64_t id, const std::string & key) const {
        switch (gguf_get_kv_type(gguf_, id)) {
            case GGUF_TYPE_UINT32: return gguf_get_val_u32(gguf_, id);
            case GGUF_TYPE_INT32: return gguf_get_val_i32(gguf_, id);
            default: check(false, key, "an integer of 32 bits"); return 0;
        }
    }

    static int within(int64_t value, const std::string & key, range allowed) {
        if (value < allowed.low || value > allowed.high) {
            throw file_error("key " + key + " of the drafter is " + std::to_string(value) +
                             ", expected " + std::to_string(allowed.low) + " .. " +
                             std::to_string(allowed.high) + "; convert it again");
        }
        return static_cast<int>(value);
    }

    float real_at(int64_t id, const std::string & key) const {
        check(gguf_get_kv_type(gguf_, id) == GGUF_TYPE_FLOAT32, key, "a float");
        const float value = gguf_get_val_f32(gguf_, id);
        check(std::isfinite(value), key, "a finite number");
        return value;
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
    rope.n_dims = k.integer(p + "rope.dimension_count", {2, head_dim}, head_dim);
    if (rope.n_dims % 2 != 0) {
        throw file_error("RoPE of the drafter turns " + std::to_string(rope.n_dims) +
                         " dimensions, expected an even number; convert it again");
    }
    const std::string base = p + "rope.freq_base";
    rope.freq_base = k.positive(base, k.real(base, 10000.0f));
    rope.n_ctx_orig = k.integer(p + "rope.scaling.original_context_length", any_count,
                                k.integer(p + "context_length", any_count, 0));
    const std::string scaling = k.text(p + "rope.scaling.type", "linear");
    rope.attn_factor = k.real(p + "rope.scaling.attn_factor", 1.0f);
    std::string factor_key = p + "rope.scaling.factor";
    if (k.real(factor_key, 0.0f) == 0.0f) {
        factor_key = p + "rope.scale_linear";  // as old files have it
    }
    const float factor = k.real(factor_key, 0.0f);
    if (scaling == "none" || factor == 0.0f) {
        return rope;
    }
    k.positive(factor_key, factor);
    if (scaling != "linear" && scaling != "yarn") {
        throw file_error("RoPE scaling '" + scaling +
                         "' of the drafter is not known; "
                         "known are none, linear and yarn");
    }
    rope.freq_scale = 1.0f / factor;
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
    params.n_embd = k.integer(p + "embedding_length", width_range);
    params.n_layer = k.integer(p + "block_count", layer_range);
    params.n_head = k.integer(p + "attention.head_count", head_range);
    params.n_head_kv = k.integer(p + "attention.head_count_kv", head_range, params.n_head);
    if (params.n_head % params.n_head_kv != 0) {
        throw file_error("the drafter's " + std::to_string(params.n_head) + " heads cannot share " +
                         std::to_string(params.n_head_kv) + " heads of keys; convert it again");
    }
    params.head_dim =
        k.integer(p + "attention.key_length", head_range, params.n_embd / params.n_head);
    params.block_size = k.integer(p + "block_size", block_range);
    params.mask_token = k.integer("tokenizer.ggml.mask_token_id", any_count);
    params.target_layers = k.integers(p + "target_layers");
    if (params.target_layers.empty()) {
        throw file_error("key dflash.target_layers of the drafter is empty");
    }
    const std::string eps = p + "attention.layer_norm_rms_epsilon";
    params.rms_eps = k.positive(eps, k.real(eps));
    params.sliding_window = k.integer(p + "attention.sliding_window", any_count, 0);
    params.is_sliding =
        k.flags(p + "attention.sliding_window_pattern", params.n_layer, params.sliding_window > 0);
    if (params.sliding_window == 0) {
        params.is_sliding.assign(params.n_layer, false);
    }
    params.attention_scale = k.real(p + "attention.scale", 0.0f);
    if (params.attention_scale == 0.0f) {
        params.attention_scale = 1.0f / std::sqrt(static_cast<float>(params.head_dim));
    }
    params.value_scale = k.real(p + "attention.value_scale", 0.0f);
    const float scale = k.real(p + "embedding_scale", 0.0f);
    params.embedding_scale = scale == 0.0f ? 1.0f : scale;
    params.logit_scale = k.real(p + "logit_scale", 0.0f);
    params.logit_cap = k.real(p + "final_logit_softcapping", 0.0f);
    const std::string act = k.text(p + "hidden_activation", "silu");
    params.gelu = act == "gelu" || act == "gelu_pytorch_tanh";
    if (!params.gelu && act != "silu") {
        throw file_error("activation '" + act +
                         "' of the drafter is not known; "
                         "known are silu and gelu");
    }
    params.rope = read_rope(k, p, params.head_dim);
    return params;
}

}  // namespace dflash
