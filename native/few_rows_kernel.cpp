#include "few_rows_kernel.h"

#include <algorithm>

#include "cuda/arguments.h"

namespace dflash {

namespace {

struct block_type {
    ggml_type type;
    const char * name;  // as in native/cuda/product.cuh
    int unit_bytes;     // in shared memory; 0: the kernels read such floats without it
};

constexpr block_type block_types[] = {
    {GGML_TYPE_Q2_K, "Q2_K", 84},      {GGML_TYPE_Q3_K, "Q3_K", 110},
    {GGML_TYPE_Q4_K, "Q4_K", 144},     {GGML_TYPE_Q5_K, "Q5_K", 176},
    {GGML_TYPE_Q6_K, "Q6_K", 210},     {GGML_TYPE_Q8_0, "Q8_0", 272},
    {GGML_TYPE_Q4_0, "Q4_0", 144},     {GGML_TYPE_Q4_1, "Q4_1", 160},
    {GGML_TYPE_Q5_0, "Q5_0", 176},     {GGML_TYPE_Q5_1, "Q5_1", 192},
    {GGML_TYPE_IQ4_NL, "IQ4_NL", 144}, {GGML_TYPE_IQ4_XS, "IQ4_XS", 136},
    {GGML_TYPE_MXFP4, "MXFP4", 136},   {GGML_TYPE_IQ3_XXS, "IQ3_XXS", 98},
    {GGML_TYPE_IQ3_S, "IQ3_S", 110},   {GGML_TYPE_F16, "F16", 0},
    {GGML_TYPE_BF16, "BF16", 0},
};

const block_type * find_type(ggml_type type) {
    for (const block_type & known : block_types) {
        if (known.type == type) {
            return &known;
        }
    }
    return nullptr;
}

std::string operand_name(const few_rows_kernel::operand & o) {
    return std::string(find_type(o.type)->name) + (o.aligned ? "" : "_U");
}

int ring_bytes(const few_rows_kernel::operand & o) {
    const int unit_bytes = find_type(o.type)->unit_bytes;
    return unit_bytes == 0 ? 0 : few_rows::weight_bytes(few_rows::row_pitch(unit_bytes, o.aligned));
}

// Whether all units of all rows of a matrix, of k elements, are whole and lie at multiples of 16
// bytes; of floats, whether all groups do.
bool has_aligned_units(const block_type & type, const void * at, int64_t k, size_t row_bytes) {
    return (type.unit_bytes == 0 || k % few_rows::UNIT == 0) && type.unit_bytes % 16 == 0 &&
           is_aligned(at, row_bytes, 16);
}

}  // namespace

bool is_aligned(const void * at, size_t stride, size_t to) {
    return reinterpret_cast<uintptr_t>(at) % to == 0 && stride % to == 0;
}

bool is_matrix(const ggml_tensor & t) { return t.ne[2] == 1 && t.ne[3] == 1; }

bool are_readable_experts(const ggml_tensor & w, const few_rows_rules & rules) {
    return find_type(w.type) != nullptr && w.ne[3] == 1 && ggml_is_contiguous(&w) &&
           w.ne[0] % 32 == 0 && w.op == GGML_OP_NONE && w.view_src == nullptr &&
           is_aligned(w.data, w.nb[1], 2) && rules.reads(w);
}

bool is_readable(const ggml_tensor & w, const few_rows_rules & rules) {
    return is_matrix(w) && are_readable_experts(w, rules);
}

few_rows_kernel::operand operand_of(const ggml_tensor & w) {
    return {w.type, has_aligned_units(*find_type(w.type), w.data, w.ne[0], w.nb[1])};
}

std::string few_rows_operand(ggml_type type, int64_t k) {
    const block_type * known = find_type(type);
    if (known == nullptr || k % 32 != 0 || k % ggml_blck_size(type) != 0 ||
        ggml_row_size(type, k) % 2 != 0) {
        return "";
    }
    return operand_name({type, has_aligned_units(*known, nullptr, k, ggml_row_size(type, k))});
}

std::string few_rows_kernel::name() const {
    if (of_experts) {
        return "experts_" + operand_name(a);
    }
    return "product_" + operand_name(a) + "_" + operand_name(b) + "_" + std::to_string(tiles);
}

std::string few_rows_attention(ggml_type keys, ggml_type values, int head_dim) {
    const auto name_of = [](ggml_type type) -> std::string {
        return type == GGML_TYPE_F16 ? "F16" : type == GGML_TYPE_Q8_0 ? "Q8_0" : "";
    };
    // Others, llama.cpp computes on the CPU.
    const bool is_known = head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 112 ||
                          head_dim == 128 || head_dim == 256;
    const std::string k = name_of(keys), v = name_of(values);
    if (!is_known || k.empty() || v.empty() ||
        head_dim % static_cast<int>(std::max(ggml_blck_size(keys), ggml_blck_size(values))) != 0) {
        return "";
    }
    return k + "_" + v + "_" + std::to_string(head_dim);
}

std::string few_rows_attention_kernel::name() const {
    return "attention_" + few_rows_attention(keys, values, head_dim) + "_" + std::to_string(groups);
}

int few_rows_attention_kernel::shared_bytes() const {
    return few_rows::attention_shared_memory(head_dim, groups, heads, keys == GGML_TYPE_Q8_0,
                                             values == GGML_TYPE_Q8_0);
}

int few_rows_kernel::shared_bytes() const {
    return few_rows::product_shared_memory(ring_bytes(a), of_experts ? 0 : ring_bytes(b), tiles);
}

// Fitted to the times of six shapes with all parts, 1 to 32 columns, on an H100: a multiprocessor
// holds two blocks, which share its time; each pair of blocks adds the time of some 2.5 units.
int few_rows_units_per_part(int row_blocks, int units, int n_processors) {
    int best = units;
    float least = 0.0f;
    for (int n = units; n >= 1; n--) {
        const int parts = (units + n - 1) / n;
        const int blocks = (row_blocks * parts + n_processors - 1) / n_processors;
        const float cost = static_cast<float>(std::max(blocks, 2) * n) + 2.5f * ((blocks + 1) / 2);
        if (n == units || cost < least) {
            best = n;
            least = cost;
        }
    }
    return best;
}

bool takes_matrix(const ggml_tensor & weight, int64_t n_columns, const few_rows_rules & rules) {
    if (!is_readable(weight, rules)) {
        return false;
    }
    const auto o = operand_of(weight);
    return rules.has({o, o, 1}) &&
           rules.is_faster(weight.type, weight.ne[0], weight.ne[1], n_columns);
}

}  // namespace dflash
