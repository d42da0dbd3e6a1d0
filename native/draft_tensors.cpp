#include "draft_tensors.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <system_error>
#include <utility>

#include "backend.h"
#include "bf16_weights.h"
#include "errors.h"

namespace dflash {

namespace {

constexpr size_t read_chunk = size_t{32} << 20;

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
class draft_tensors::file_data {
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

draft_tensors::draft_tensors(const std::string & path, const draft_params & params,
                             ggml_backend_t backend, std::optional<bool> bf16)
    : params_(params), backend_(backend) {
    params.check();
    ggml_context * raw = nullptr;
    gguf_.reset(gguf_init_from_file(path.c_str(), {/*no_alloc=*/true, &raw}));
    const ggml_context_ptr shapes(raw);
    if (!gguf_) {
        throw file_error(path + " is not a GGUF file that ggml can read");
    }
    data_ = std::make_unique<file_data>(path, gguf_.get());
    read_tokens();
    is_bf16_ = bf16.has_value() ? *bf16 : pays_in_bf16(shapes.get());
    create(shapes.get());
}

draft_tensors::~draft_tensors() = default;

void draft_tensors::read() {
    const auto is_unknown = [](const auto & made) { return !made.second.is_taken; };
    const auto unknown = std::find_if(made_.begin(), made_.end(), is_unknown);
    if (unknown != made_.end()) {
        throw file_error("the draft graph does not know tensor " + unknown->first + " (" +
                         std::to_string(std::count_if(unknown, made_.end(), is_unknown)) +
                         " such): this drafter is of a kind that is not known here");
    }
    for (const auto & [name, made] : made_) {
        data_->check(made.source);
    }
    device_buffer_ =
        allocate(device_tensors_.get(), ggml_backend_get_default_buffer_type(backend_));
    host_buffer_ = allocate(
        host_tensors_.get(),
        ggml_backend_dev_buffer_type(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)));
    read_rows();
    data_.reset();
    gguf_.reset();
}

// The table of a head that knows only some tokens. It comes first, as other tensors are read by it.
void draft_tensors::read_tokens() {
    file_data & data = *data_;
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

void draft_tensors::create(ggml_context * file) {
    const gguf_context * gguf = gguf_.get();
    const int64_t n = gguf_get_n_tensors(gguf);
    // Each tensor, the stacks of some, and the parts of stacks.
    const size_t most = static_cast<size_t>(n) + 8 * static_cast<size_t>(params_.n_layer) + 24;
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
void draft_tensors::create_tables(ggml_context * file) {
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
            ggml_new_tensor_2d(device_tensors_.get(), GGML_TYPE_F32, params_.n_embd, 1);
        ggml_set_name(part, confidence_of_state);
        made_[confidence_of_state] = {part};
    }
}

bool draft_tensors::pays_in_bf16(ggml_context * file) const {
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
                                                      largest->ne[1], params_.block_size, n_more);
}

bool draft_tensors::becomes_bf16(const ggml_tensor * shape) const {
    return dflash::becomes_bf16(backend_, shape->type, shape->ne[0]);
}

// The type that a tensor of the file gets.
ggml_type draft_tensors::type_of(const ggml_tensor * shape) const {
    const std::string name = shape->name;
    if (name.find("_conv_base") != std::string::npos || name == confidence_name) {
        return GGML_TYPE_F32;
    }
    const bool widens = is_bf16_ && is_product(shape) && becomes_bf16(shape);
    return widens ? GGML_TYPE_BF16 : shape->type;
}

// Which of its rows, and in which order; empty: all.
std::vector<int64_t> draft_tensors::rows_of(const ggml_tensor * shape) const {
    const std::string name = shape->name;
    const bool is_base = name.find("_conv_base") != std::string::npos;
    std::vector<int64_t> rows;
    if (name == selector_after_name) {
        rows.assign(tokens.begin(), tokens.end());
    }
    if (is_base || name.find("_conv_proj.weight") != std::string::npos) {
        const selector_params & p = params_.selector;
        const int64_t n_groups = is_base ? 1 : params_.n_embd / p.group_size;
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
void draft_tensors::stack_all(ggml_context * file) {
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
    for (int i = 0; i < params_.n_layer; i++) {
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
bool draft_tensors::stack(ggml_context * file, const std::vector<std::string> & names) {
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

void draft_tensors::add(ggml_context * home, const ggml_tensor * shape, int64_t source,
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

ggml_tensor * draft_tensors::take(const std::string & name, std::vector<int64_t> shape,
                                  bool required) {
    const auto it = made_.find(name);
    if (it == made_.end()) {
        if (required) {
            throw file_error("the drafter has no tensor " + name + "; convert it again");
        }
        return nullptr;
    }
    ggml_tensor * tensor = it->second.tensor;
    it->second.is_taken = true;
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

void draft_tensors::read_rows() {
    file_data & data = *data_;
    std::vector<char> packed;
    for (const auto & [name, made] : made_) {
        const auto & [tensor, i, rows, is_taken] = made;
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
void draft_tensors::write_rows(ggml_type type, const std::vector<char> & packed, int64_t n,
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

}  // namespace dflash
