#include "drafter_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <system_error>

#include "gguf.h"

namespace {

// Of heads.
constexpr int rank = 32;
constexpr int kernel_size = 3;
constexpr int group_size = 64;

std::vector<int64_t> shape_of(const ggml_tensor * tensor) {
    return {tensor->ne, tensor->ne + ggml_n_dims(tensor)};
}

std::vector<float> floats_of(const ggml_tensor * tensor) {
    std::vector<float> values(ggml_nelements(tensor));
    if (tensor->type == GGML_TYPE_F32) {
        std::memcpy(values.data(), tensor->data, ggml_nbytes(tensor));
    } else {
        ggml_get_type_traits(tensor->type)
            ->to_float(tensor->data, values.data(), static_cast<int64_t>(values.size()));
    }
    return values;
}

}  // namespace

dflash::draft_params small_params(int n_embd) {
    dflash::draft_params params;
    params.n_embd = n_embd;
    params.n_layer = 1;
    params.n_head = 4;
    params.n_head_kv = 2;
    params.head_dim = 32;
    params.block_size = 4;
    params.mask_token = 3;
    params.n_taps = 1;
    params.is_sliding = {false};
    params.attention_scale = 1.0f / std::sqrt(32.0f);
    params.rope.n_dims = params.head_dim;
    params.rope.freq_base = 1e6f;
    return params;
}

dflash::draft_params with_markov() {
    dflash::draft_params params = small_params();
    params.markov_rank = rank;
    params.from_anchor = true;
    return params;
}

dflash::draft_params with_selector() {
    dflash::draft_params params = small_params();
    params.selector = {rank, /*top_k=*/5, kernel_size, group_size};
    return params;
}

temporary_file::temporary_file() {
    static int n = 0;
    static const unsigned seed = std::random_device()();
    const std::string name = "test_native-" + std::to_string(seed) + "-" + std::to_string(n++);
    path_ = (std::filesystem::temp_directory_path() / (name + ".gguf")).string();
}

temporary_file::~temporary_file() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
}

drafter_file::drafter_file(const dflash::draft_params & params) {
    constexpr int64_t n_ff = 64;
    constexpr ggml_type f32 = GGML_TYPE_F32;
    constexpr ggml_type q8_0 = GGML_TYPE_Q8_0;
    const int64_t n_embd = params.n_embd;
    const int64_t head_dim = params.head_dim;
    const int64_t n_q = params.n_head * head_dim;
    const int64_t n_kv = params.n_embd_kv();
    set("fc.weight", q8_0, {n_embd, n_embd});
    set("enc.output_norm.weight", f32, {n_embd});
    set("output_norm.weight", f32, {n_embd});
    set("blk.0.attn_norm.weight", f32, {n_embd});
    set("blk.0.attn_q.weight", q8_0, {n_embd, n_q});
    set("blk.0.attn_k.weight", q8_0, {n_embd, n_kv});
    set("blk.0.attn_v.weight", q8_0, {n_embd, n_kv});
    set("blk.0.attn_output.weight", q8_0, {n_q, n_embd});
    set("blk.0.attn_q_norm.weight", f32, {head_dim});
    set("blk.0.attn_k_norm.weight", f32, {head_dim});
    set("blk.0.ffn_norm.weight", f32, {n_embd});
    set("blk.0.ffn_gate.weight", q8_0, {n_embd, n_ff});
    set("blk.0.ffn_up.weight", q8_0, {n_embd, n_ff});
    set("blk.0.ffn_down.weight", q8_0, {n_ff, n_embd});
}

drafter_file::drafter_file(const std::string & path) {
    ggml_context * raw = nullptr;
    const gguf_context_ptr gguf(gguf_init_from_file(path.c_str(), {/*no_alloc=*/false, &raw}));
    if (!gguf) {
        throw std::runtime_error("cannot read " + path);
    }
    contexts_.emplace_back(raw);
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf.get()); i++) {
        tensors_.push_back(ggml_get_tensor(raw, gguf_get_tensor_name(gguf.get(), i)));
    }
}

ggml_tensor * drafter_file::create(const std::string & name, ggml_type type,
                                   const std::vector<int64_t> & shape) {
    size_t n_bytes = ggml_row_size(type, shape[0]);
    for (size_t i = 1; i < shape.size(); i++) {
        n_bytes *= shape[i];
    }
    contexts_.emplace_back(ggml_init({ggml_tensor_overhead() + n_bytes + 256, nullptr, false}));
    ggml_tensor * tensor =
        ggml_new_tensor(contexts_.back().get(), type, static_cast<int>(shape.size()), shape.data());
    ggml_set_name(tensor, name.c_str());
    std::memset(tensor->data, 0, n_bytes);
    const auto same = std::find_if(tensors_.begin(), tensors_.end(),
                                   [&](const ggml_tensor * t) { return t->name == name; });
    if (same != tensors_.end()) {
        *same = tensor;
    } else {
        tensors_.push_back(tensor);
    }
    return tensor;
}

void drafter_file::set(const std::string & name, ggml_type type,
                       const std::vector<int64_t> & shape) {
    ggml_tensor * tensor = create(name, type, shape);
    const bool is_for_weights =
        type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
    if (!is_for_weights) {
        return;
    }
    std::mt19937 random(seed_++);
    const float spread = 1.0f / std::sqrt(static_cast<float>(shape[0]));
    std::normal_distribution<float> normal(shape.size() == 1 ? 1.0f : 0.0f, spread);
    std::vector<float> values(ggml_nelements(tensor));
    std::generate(values.begin(), values.end(), [&] { return normal(random); });
    ggml_quantize_chunk(type, values.data(), tensor->data, 0, ggml_nrows(tensor), shape[0],
                        nullptr);
}

void drafter_file::set(const std::string & name, const std::vector<int64_t> & shape,
                       const std::vector<float> & values) {
    ggml_tensor * tensor = create(name, GGML_TYPE_F32, shape);
    std::memcpy(tensor->data, values.data(), values.size() * sizeof(float));
}

void drafter_file::remove(const std::string & name) {
    tensors_.erase(std::remove_if(tensors_.begin(), tensors_.end(),
                                  [&](const ggml_tensor * t) { return t->name == name; }),
                   tensors_.end());
}

void drafter_file::add_markov(int n_rows, ggml_type type) {
    set("markov_w1.weight", GGML_TYPE_Q8_0, {rank, shipped_pair::n_vocab});
    set("markov_w2.weight", type, {rank, n_rows});
    set("conf_proj.weight", GGML_TYPE_F16, {shipped_pair::n_embd + rank, 1});
    set("conf_proj.bias", GGML_TYPE_F32, {1});
}

void drafter_file::add_selector(ggml_type type) {
    constexpr int n_embd = shipped_pair::n_embd;
    set("selector_predecessor.weight", GGML_TYPE_Q8_0, {rank, shipped_pair::n_vocab});
    set("selector_successor.weight", type, {rank, shipped_pair::n_vocab});
    set("selector_hidden.weight", GGML_TYPE_Q8_0, {n_embd, rank});
    for (const std::string part : {"attn", "ffn"}) {
        const std::string name = "blk.0." + part + "_conv_";
        set(name + "base", GGML_TYPE_F32, {n_embd, kernel_size, 2});
        set(name + "proj.weight", GGML_TYPE_Q8_0, {n_embd, 2 * kernel_size * n_embd / group_size});
    }
}

void drafter_file::widen() {
    const std::vector<ggml_tensor *> narrow = tensors_;
    for (const ggml_tensor * tensor : narrow) {
        set(tensor->name, shape_of(tensor), floats_of(tensor));
    }
}

void drafter_file::add_widened(const std::string & path, const std::string & from,
                               const std::string & to) {
    const drafter_file other(path);
    for (const ggml_tensor * tensor : other.tensors_) {
        if (tensor->name == from) {
            set(to, shape_of(tensor), floats_of(tensor));
            return;
        }
    }
    throw std::runtime_error(path + " has no " + from);
}

void drafter_file::write(const std::string & path) const {
    const gguf_context_ptr out(gguf_init_empty());
    for (const ggml_tensor * tensor : tensors_) {
        gguf_add_tensor(out.get(), tensor);
    }
    if (!gguf_write_to_file(out.get(), path.c_str(), /*only_meta=*/false)) {
        throw std::runtime_error("cannot write " + path);
    }
}
