#include "draft_weights.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>
#include <system_error>
#include <utility>

#include "backend.h"
#include "bf16_weights.h"
#include "errors.h"
#include "target_tensors.h"

namespace dflash {

namespace {

constexpr size_t read_chunk = size_t{32} << 20;

constexpr const char * embedding_name = "token_embd.weight";
constexpr const char * head_name = "output.weight";
constexpr const char * tokens_name = "d2t";
constexpr const char * confidence_name = "conf_proj.weight";
// Of these the host reads the anchor's rows. What the device reads are the rows of drafted tokens.
constexpr const char * markov_name = "markov_w1.weight";
constexpr const char * selector_name = "selector_predecessor.weight";
constexpr const char * selector_after_name = "selector_successor.weight";
constexpr const char * markov_drafted = "markov_w1.drafted";
constexpr const char * selector_drafted = "selector_predecessor.drafted";
constexpr const char * confidence_of_state = "conf_proj.state";

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

// Only single rows of these are read, on the host.
bool is_on_host(const std::string & name) {
    return name == embedding_name || name == markov_name || name == selector_name ||
           name == confidence_name;
}

// Whether it is a matrix that columns are multiplied with. Of the others, rows are looked up.
bool is_product(const ggml_tensor * tensor) {
    return ggml_n_dims(tensor) == 2 && !is_on_host(tensor->name) &&
           std::string(tensor->name) != selector_after_name;
}

}  // namespace

// Reads the data of a file's tensors.
class draft_weights::file_data {
  public:
    file_data(const std::string & path, const gguf_context * of_file)
        : gguf(of_file), path_(path), file_(std::filesystem::u8path(path), std::ios::binary) {
        std::error_code error;
        n_bytes_ = std::filesystem::file_size(std::filesystem::u8path(path), error);
        n_bytes_ = error ? 0 : n_bytes_;
    }

    // Checked before memory is taken: a small file can claim any size.
    void check(int64_t tensor) const {
        if (tensor >= 0 && begin(tensor) + gguf_get_tensor_size(gguf, tensor) > n_bytes_) {
            refuse(tensor);
        }
    }

    // n bytes of a tensor from this one on.
    void read(int64_t tensor, size_t first, size_t n, void * out) {
        file_.seekg(static_cast<std::streamoff>(begin(tensor) + first));
        if (!file_.read(static_cast<char *>(out), static_cast<std::streamsize>(n))) {
            refuse(tensor);
        }
    }

    const gguf_context * const gguf;

  private:
    std::uintmax_t begin(int64_t tensor) const {
        return std::uintmax_t{gguf_get_data_offset(gguf)} + gguf_get_tensor_offset(gguf, tensor);
    }

    [[noreturn]] void refuse(int64_t tensor) const {
        throw file_error(path_ + " ends inside tensor " + gguf_get_tensor_name(gguf, tensor) +
                         "; fetch it again");
    }

    std::string path_;
    std::ifstream file_;
    std::uintmax_t n_bytes_ = 0;
};

draft_weights::draft_weights(const std::string & path, const draft_params & of_file,
                             ggml_backend_t backend, std::optional<bool> bf16)
    : params(of_file), backend_(backend) {
    params.check();
    ggml_context * raw = nullptr;
    const gguf_context_ptr gguf(gguf_init_from_file(path.c_str(), {/*no_alloc=*/true, &raw}));
    const ggml_context_ptr file(raw);
    if (!gguf) {
        throw file_error(path + " is not a GGUF file that ggml can read");
    }
    file_data data(path, gguf.get());
    read_tokens(data);
    is_bf16_ = bf16.has_value() ? *bf16 : pays_in_bf16(file.get());
    create(file.get(), gguf.get());
    bind();
    for (const auto & [name, made] : made_) {
        data.check(made.source);
    }
    device_buffer_ = allocate(device_tensors_.get(), ggml_backend_get_default_buffer_type(backend));
    host_buffer_ = allocate(
        host_tensors_.get(),
        ggml_backend_dev_buffer_type(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)));
    read(data);
    add_up_confidence();
    bound_values();
}

// The table of a head that knows only some tokens. It comes first, as other tensors are read by it.
void draft_weights::read_tokens(file_data & data) {
    const int64_t i = gguf_find_tensor(data.gguf, tokens_name);
    if (i < 0) {
        return;
    }
    const ggml_type type = gguf_get_tensor_type(data.gguf, i);
    if (type != GGML_TYPE_I64) {
        throw file_error(std::string("tensor ") + tokens_name + " of the drafter is of type " +
                         ggml_type_name(type) + ", expected i64");
    }
    data.check(i);
    std::vector<int64_t> ids(gguf_get_tensor_size(data.gguf, i) / sizeof(int64_t));
    data.read(i, 0, ids.size() * sizeof(int64_t), ids.data());
    for (const int64_t id : ids) {
        if (id < 0 || id > std::numeric_limits<int32_t>::max()) {
            throw file_error(std::string("tensor ") + tokens_name +
                             " of the drafter has the token " + std::to_string(id) +
                             "; convert it again");
        }
        tokens.push_back(static_cast<int32_t>(id));
    }
}

void draft_weights::create(ggml_context * file, const gguf_context * gguf) {
    const int64_t n = gguf_get_n_tensors(gguf);
    // Each tensor, the stacks of some, and the parts of stacks.
    const size_t most = static_cast<size_t>(n) + 8 * static_cast<size_t>(params.n_layer) + 24;
    device_tensors_ = new_tensors(most);
    host_tensors_ = new_tensors(most);
    stack_all(file);
    for (int64_t i = 0; i < n; i++) {
        const std::string name = gguf_get_tensor_name(gguf, i);
        if (name == tokens_name) {
            continue;
        }
        const auto stacked = made_.find(name);
        if (stacked != made_.end()) {
            stacked->second.source = i;
            continue;
        }
        const ggml_tensor * shape = ggml_get_tensor(file, name.c_str());
        add(is_on_host(name) ? host_tensors_.get() : device_tensors_.get(), shape, i, name,
            type_of(shape), rows_of(shape));
    }
    if (made_.count(embedding_name) != 0 && made_.count(head_name) == 0) {
        const made_tensor & tied = made_.at(embedding_name);
        const bool widens = is_bf16_ && becomes_bf16(tied.tensor);
        add(device_tensors_.get(), tied.tensor, tied.source, head_name,
            widens ? GGML_TYPE_BF16 : tied.tensor->type);
    }
    create_tables(file);
}

// Tables of rows that a graph looks up come last: on some backends the argmax of values that are
// not numbers is -1, and the memory before these is then ours.
void draft_weights::create_tables(ggml_context * file) {
    for (const auto & [source, name] :
         {std::pair{markov_name, markov_drafted}, std::pair{selector_name, selector_drafted}}) {
        const ggml_tensor * shape = ggml_get_tensor(file, source);
        if (shape != nullptr) {
            add(device_tensors_.get(), shape, made_.at(source).source, name, shape->type,
                {tokens.begin(), tokens.end()});
        }
    }
    if (made_.count(confidence_name) != 0) {
        ggml_tensor * part =
            ggml_new_tensor_2d(device_tensors_.get(), GGML_TYPE_F32, params.n_embd, 1);
        ggml_set_name(part, confidence_of_state);
        made_[confidence_of_state] = {part};
    }
}

bool draft_weights::pays_in_bf16(ggml_context * file) const {
    const ggml_tensor * largest = nullptr;
    size_t n_more = 0;
    for (ggml_tensor * t = ggml_get_first_tensor(file); t != nullptr;
         t = ggml_get_next_tensor(file, t)) {
        if (is_product(t) && becomes_bf16(t)) {
            n_more += ggml_row_size(GGML_TYPE_BF16, t->ne[0]) * t->ne[1] - ggml_nbytes(t);
            if (largest == nullptr || ggml_nelements(t) > ggml_nelements(largest)) {
                largest = t;
            }
        }
    }
    return largest != nullptr && dflash::pays_in_bf16(backend_, largest->type, largest->ne[0],
                                                      largest->ne[1], params.block_size, n_more);
}

bool draft_weights::becomes_bf16(const ggml_tensor * shape) const {
    return dflash::becomes_bf16(backend_, shape->type, shape->ne[0]);
}

// The type that a tensor of the file gets.
ggml_type draft_weights::type_of(const ggml_tensor * shape) const {
    const std::string name = shape->name;
    if (name.find("_conv_base") != std::string::npos || name == confidence_name) {
        return GGML_TYPE_F32;
    }
    const bool widens = is_bf16_ && is_product(shape) && becomes_bf16(shape);
    return widens ? GGML_TYPE_BF16 : shape->type;
}

// Which of its rows, and in which order; empty: all.
std::vector<int64_t> draft_weights::rows_of(const ggml_tensor * shape) const {
    const std::string name = shape->name;
    const bool is_base = name.find("_conv_base") != std::string::npos;
    std::vector<int64_t> rows;
    if (name == selector_after_name) {
        rows.assign(tokens.begin(), tokens.end());
    }
    if (is_base || name.find("_conv_proj.weight") != std::string::npos) {
        const selector_params & p = params.selector;
        const int64_t n_groups = is_base ? 1 : params.n_embd / p.group_size;
        for (int64_t side = 0; side < 2; side++) {
            for (int64_t tap = p.kernel_size - 1; tap >= 0; tap--) {
                for (int64_t group = 0; group < n_groups; group++) {
                    rows.push_back((side * p.kernel_size + tap) * n_groups + group);
                }
            }
        }
    }
    return rows;
}

// Weights that are multiplied by the same columns are adjacent, those of all layers if types allow.
void draft_weights::stack_all(ggml_context * file) {
    for (ggml_tensor * t = ggml_get_first_tensor(file); t != nullptr;
         t = ggml_get_next_tensor(file, t)) {
        const std::string name = t->name;
        if (name.size() > 6 && name.compare(name.size() - 6, 6, ".scale") == 0) {
            return;  // each product has a factor of its own
        }
    }
    std::vector<std::string> weights;
    std::vector<std::string> biases;
    std::vector<std::string> norms;
    for (int i = 0; i < params.n_layer; i++) {
        const std::string b = "blk." + std::to_string(i) + ".";
        for (const char * part : {"attn_q", "attn_k", "attn_v"}) {
            weights.push_back(b + part + ".weight");
            biases.push_back(b + part + ".bias");
        }
        norms.push_back(b + "attn_k_norm.weight");
        stack(file, {b + "ffn_gate.weight", b + "ffn_up.weight"});
    }
    stack(file, biases);
    stack(file, norms);
    if (!stack(file, weights)) {
        for (size_t i = 0; i < weights.size(); i += 3) {
            stack(file, {weights.begin() + i, weights.begin() + i + 3});
        }
    }
}

// Makes one tensor of all, and each a part of it: matrices by rows, vectors end to end. False, with
// nothing done, if one is missing or types or widths differ.
bool draft_weights::stack(ggml_context * file, const std::vector<std::string> & names) {
    std::vector<const ggml_tensor *> parts;
    bool vectors = true;
    for (const std::string & name : names) {
        const ggml_tensor * part = ggml_get_tensor(file, name.c_str());
        if (part == nullptr || ggml_n_dims(part) > 2 || made_.count(name) != 0) {
            return false;
        }
        vectors = vectors && part->ne[1] == 1;
        parts.push_back(part);
    }
    const ggml_type type = type_of(parts[0]);
    int64_t n = 0;
    for (const ggml_tensor * part : parts) {
        if (type_of(part) != type || (!vectors && part->ne[0] != parts[0]->ne[0])) {
            return false;
        }
        n += vectors ? part->ne[0] : part->ne[1];
    }
    ggml_context * home = device_tensors_.get();
    ggml_tensor * all = vectors ? ggml_new_tensor_1d(home, type, n)
                                : ggml_new_tensor_2d(home, type, parts[0]->ne[0], n);
    size_t offset = 0;
    for (size_t i = 0; i < parts.size(); i++) {
        ggml_tensor * part =
            vectors ? ggml_view_1d(home, all, parts[i]->ne[0], offset)
                    : ggml_view_2d(home, all, all->ne[0], parts[i]->ne[1], all->nb[1], offset);
        ggml_set_name(part, names[i].c_str());
        made_[names[i]] = {part};
        offset += ggml_nbytes(part);
    }
    return true;
}

void draft_weights::add(ggml_context * home, const ggml_tensor * shape, int64_t source,
                        const std::string & name, ggml_type type, std::vector<int64_t> rows) {
    ggml_tensor * tensor = nullptr;
    if (type != shape->type) {
        check_type(shape, /*is_matrix=*/true);  // or it cannot be converted
    }
    if (rows.empty() && type == shape->type) {
        tensor = ggml_dup_tensor(home, shape);
    } else {
        const int64_t n_rows = rows.empty() ? ggml_nrows(shape) : static_cast<int64_t>(rows.size());
        if (!rows.empty() && *std::max_element(rows.begin(), rows.end()) >= ggml_nrows(shape)) {
            throw file_error("tensor " + name + " of the drafter has " +
                             std::to_string(ggml_nrows(shape)) +
                             " rows, too few for its other tensors; convert it again");
        }
        tensor = ggml_new_tensor_2d(home, type, shape->ne[0], n_rows);
    }
    ggml_set_name(tensor, name.c_str());
    if (!made_.emplace(name, made_tensor{tensor, source, std::move(rows)}).second) {
        throw file_error("the drafter has two tensors " + name + "; convert it again");
    }
}

ggml_tensor * draft_weights::take(const std::string & name, std::vector<int64_t> shape,
                                  bool required) {
    const auto it = made_.find(name);
    if (it == made_.end()) {
        if (required) {
            throw file_error("the drafter has no tensor " + name + "; convert it again");
        }
        return nullptr;
    }
    ggml_tensor * tensor = it->second.tensor;
    it->second.is_bound = true;
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
    const int64_t n_rows = tokens.empty() ? -1 : static_cast<int64_t>(tokens.size());
    fc = take_matrix("fc", {params.n_features(), d});
    fc_norm = take("enc.output_norm.weight", {d});
    out_norm = take("output_norm.weight", {d});
    embedding = take(embedding_name, {d, -1}, false);
    head = take_matrix("output", {d, n_rows}, !tokens.empty());
    rope_freqs = take("rope_freqs.weight", {params.rope.n_dims / 2}, false);
    layers.resize(params.n_layer);
    for (int i = 0; i < params.n_layer; i++) {
        draft_layer & l = layers[i];
        const std::string b = "blk." + std::to_string(i) + ".";
        l.attn_norm = take(b + "attn_norm.weight", {d});
        l.attn_q = take_matrix(b + "attn_q", {d, q});
        l.attn_k = take_matrix(b + "attn_k", {d, kv});
        l.attn_v = params.values_from_keys ? nullptr : take_matrix(b + "attn_v", {d, kv});
        l.attn_output = take_matrix(b + "attn_output", {q, d});
        l.attn_sinks = take(b + "attn_sinks.weight", {params.n_head}, false);
        l.attn_q_bias = take(b + "attn_q.bias", {q}, false);
        l.attn_k_bias = take(b + "attn_k.bias", {kv}, false);
        l.attn_v_bias = take(b + "attn_v.bias", {kv}, false);
        l.attn_output_bias = take(b + "attn_output.bias", {d}, false);
        l.attn_q_norm = take(b + "attn_q_norm.weight", {hd});
        l.attn_k_norm = take(b + "attn_k_norm.weight", {hd});
        l.attn_post_norm = take(b + "post_attention_norm.weight", {d}, false);
        l.ffn_norm = take(b + "ffn_norm.weight", {d});
        l.ffn_gate = take_matrix(b + "ffn_gate", {d, -1});
        const int64_t ff = l.ffn_gate->ne[1];
        l.ffn_up = take_matrix(b + "ffn_up", {d, ff});
        l.ffn_down = take_matrix(b + "ffn_down", {ff, d});
        l.ffn_post_norm = take(b + "post_ffw_norm.weight", {d}, false);
        l.output_scale = take(b + "layer_output_scale.weight", {1}, false);
        if (params.selector.rank > 0) {
            l.attn_conv = take_conv(b + "attn_conv");
            l.ffn_conv = take_conv(b + "ffn_conv");
        }
    }
    bind_heads();
    bind_stacks();
    const auto is_unknown = [](const auto & made) { return !made.second.is_bound; };
    const auto unknown = std::find_if(made_.begin(), made_.end(), is_unknown);
    if (unknown != made_.end()) {
        throw file_error("the draft graph does not know tensor " + unknown->first + " (" +
                         std::to_string(std::count_if(unknown, made_.end(), is_unknown)) +
                         " such): this drafter is of a kind that is not known here");
    }
}

conv_weights draft_weights::take_conv(const std::string & name) {
    const selector_params & p = params.selector;
    const int64_t n_groups = params.n_embd / p.group_size;
    conv_weights conv;
    conv.base = take(name + "_base", {params.n_embd, int64_t{2} * p.kernel_size});
    conv.proj = take(name + "_proj.weight", {params.n_embd, n_groups * 2 * p.kernel_size});
    return conv;
}

void draft_weights::bind_heads() {
    const int64_t d = params.n_embd;
    const int64_t n_rows = tokens.empty() ? -1 : static_cast<int64_t>(tokens.size());
    if (params.markov_rank > 0) {
        const int64_t rank = params.markov_rank;
        anchor_table = take(markov_name, {rank, -1});
        markov.before = take(markov_drafted, {rank, n_rows});
        markov.after = take_matrix("markov_w2", {rank, n_rows});
        confidence_ = take(confidence_name, {d + rank, 1}, false);
        confidence_bias_ = take("conf_proj.bias", {1}, false);
        if (confidence_ != nullptr) {
            markov.confidence = take(confidence_of_state, {d, 1});
        }
    }
    if (params.selector.rank > 0) {
        const int64_t rank = params.selector.rank;
        anchor_table = take(selector_name, {rank, -1});
        selector.before = take(selector_drafted, {rank, n_rows});
        selector.after = take(selector_after_name, {rank, n_rows});
        selector.gate = take("selector_hidden.weight", {d, rank});
    }
}

ggml_tensor * draft_weights::take_matrix(const std::string & name, std::vector<int64_t> shape,
                                         bool required) {
    ggml_tensor * matrix = take(name + ".weight", std::move(shape), required);
    if (ggml_tensor * scale = take(name + ".scale", {1}, false)) {
        scales_[matrix] = scale;
    }
    return matrix;
}

void draft_weights::bind_stacks() {
    ggml_context * c = device_tensors_.get();
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

void draft_weights::read(file_data & data) {
    std::vector<char> packed;
    for (const auto & [name, made] : made_) {
        const auto & [tensor, i, rows, is_bound] = made;
        if (i < 0) {
            continue;
        }
        const ggml_type type = gguf_get_tensor_type(data.gguf, i);
        const size_t row = ggml_row_size(type, tensor->ne[0]);
        const int64_t n_rows = ggml_nrows(tensor);
        const auto at_once = static_cast<int64_t>(std::max<size_t>(1, read_chunk / row));
        for (int64_t first = 0; first < n_rows; first += at_once) {
            const int64_t n = std::min(at_once, n_rows - first);
            packed.resize(n * row);
            if (rows.empty()) {
                data.read(i, first * row, packed.size(), packed.data());
            } else {
                for (int64_t j = 0; j < n; j++) {
                    data.read(i, rows[first + j] * row, row, packed.data() + j * row);
                }
            }
            write_rows(type, packed, n, tensor, first);
        }
    }
}

// n rows of this type to those of the tensor from row `first` on, in its own type.
void draft_weights::write_rows(ggml_type type, const std::vector<char> & packed, int64_t n,
                               ggml_tensor * tensor, int64_t first) const {
    const size_t offset = first * tensor->nb[1];
    if (tensor->type == type) {
        ggml_backend_tensor_set(tensor, packed.data(), offset, packed.size());
    } else if (tensor->type == GGML_TYPE_BF16) {
        write_as_bf16(backend_, type, packed.data(), n, tensor, first);
    } else {
        std::vector<float> values(n * tensor->ne[0]);
        ggml_get_type_traits(type)->to_float(packed.data(), values.data(),
                                             static_cast<int64_t>(values.size()));
        ggml_backend_tensor_set(tensor, values.data(), offset, values.size() * sizeof(float));
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
