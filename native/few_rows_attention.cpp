#include "few_rows_attention.h"

#include <algorithm>
#include <cstring>

#include "few_rows_groups.h"

namespace dflash {

namespace {

constexpr int most_groups = 4;

few_rows_attention_kernel kernel_of(const ggml_tensor & node, const few_rows_rules & rules) {
    const ggml_tensor &q = *node.src[0], &k = *node.src[1], &v = *node.src[2];
    const auto heads = static_cast<int>(q.ne[2] / k.ne[2]), head_dim = static_cast<int>(q.ne[0]);
    const int n_queries = static_cast<int>(q.ne[1]) * heads;
    few_rows_attention_kernel kernel{k.type, v.type, head_dim, 1, heads};
    while (kernel.groups * few_rows::GROUP_QUERIES < n_queries && kernel.groups < most_groups) {
        kernel.groups *= 2;
    }
    // Fewer groups a block give the same bits, from more blocks.
    while (kernel.groups > 1 && !rules.attends(kernel)) {
        kernel.groups /= 2;
    }
    return kernel;
}

// Whether lanes can copy the cells of a cache: sixteen bytes at a time, or two.
bool has_cells(const ggml_tensor & t) {
    const size_t to = t.type == GGML_TYPE_F16 ? 16 : 2;
    return t.nb[0] == ggml_type_size(t.type) && is_aligned(t.data, t.nb[1] | t.nb[2] | t.nb[3], to);
}

size_t floats(size_t bytes) { return bytes / sizeof(float); }

// n * inverse_of(d) >> 32 is n / d, for n of some thousands.
uint64_t inverse_of(int d) { return ((uint64_t{1} << 32) + d - 1) / d; }

int n_chunks_of(int64_t n_cells, int n_kv_heads, int head_dim) {
    int n = 1;
    while (few_rows::chunk_begin(n, n_kv_heads, head_dim) < n_cells) {
        n++;
    }
    return n;
}

}  // namespace

bool takes_attention(const ggml_tensor & t, const few_rows_rules & rules) {
    if (t.op != GGML_OP_FLASH_ATTN_EXT || !is_computed(t) || !rules.attends) {
        return false;
    }
    const ggml_tensor &q = *t.src[0], &k = *t.src[1], &v = *t.src[2];
    const ggml_tensor *mask = t.src[3], *sinks = t.src[4];
    float max_bias = 0.0f;
    std::memcpy(&max_bias, t.op_params + 1, sizeof(float));
    const int64_t n_columns = q.ne[1] * q.ne[3];
    const bool fits =
        max_bias == 0.0f && n_columns >= 1 && n_columns <= few_rows::MAX_COLUMNS &&
        q.type == GGML_TYPE_F32 && q.nb[0] == sizeof(float) &&
        is_aligned(q.data, q.nb[1] | q.nb[2] | q.nb[3], 16) && t.type == GGML_TYPE_F32 &&
        ggml_is_contiguous(&t) && is_aligned(t.data, 0, 16) && v.ne[0] == q.ne[0] &&
        k.ne[0] == q.ne[0] && k.ne[1] == v.ne[1] && k.ne[1] > 0 && k.ne[2] == v.ne[2] &&
        q.ne[2] % k.ne[2] == 0 && has_cells(k) && has_cells(v) && mask != nullptr &&
        mask->type == GGML_TYPE_F16 && mask->nb[0] == 2 &&
        is_aligned(mask->data, mask->nb[1] | mask->nb[3], 4) && k.ne[1] % 2 == 0 &&
        mask->ne[0] >= k.ne[1] && mask->ne[1] >= q.ne[1] && mask->ne[2] == 1 &&
        (mask->ne[3] == q.ne[3] || mask->ne[3] == 1) &&
        (sinks == nullptr || (sinks->type == GGML_TYPE_F32 && ggml_is_contiguous(sinks)));
    return fits && !few_rows_attention(k.type, v.type, static_cast<int>(q.ne[0])).empty() &&
           rules.attends(kernel_of(t, rules));
}

few_rows_plan::attention plan_attention(const ggml_tensor & t, const few_rows_rules & rules,
                                        size_t & scratch_floats) {
    const ggml_tensor &q = *t.src[0], &k = *t.src[1], &v = *t.src[2];
    few_rows_plan::attention made;
    made.node = &t;
    made.kernel = kernel_of(t, rules);
    few_rows::attention & a = made.arguments;
    a.q = static_cast<const float *>(q.data);
    a.q_row = floats(q.nb[1]);
    a.q_head = floats(q.nb[2]);
    a.q_stream = floats(q.nb[3]);
    a.k = static_cast<const unsigned char *>(k.data);
    a.k_cell = k.nb[1];
    a.k_head = k.nb[2];
    a.k_stream = k.nb[3];
    a.v = static_cast<const unsigned char *>(v.data);
    a.v_cell = v.nb[1];
    a.v_head = v.nb[2];
    a.v_stream = v.nb[3];
    const ggml_tensor & mask = *t.src[3];
    a.mask = static_cast<const unsigned short *>(mask.data);
    a.mask_row = mask.nb[1] / 2;
    a.mask_stream = mask.ne[3] == 1 ? 0 : mask.nb[3] / 2;
    if (t.src[4] != nullptr) {
        a.sinks = static_cast<const float *>(t.src[4]->data);
    }
    a.out = static_cast<float *>(t.data);
    a.head_dim = made.kernel.head_dim;
    a.n_heads = static_cast<int>(q.ne[2]);
    a.n_kv_heads = static_cast<int>(k.ne[2]);
    a.group_inverse = inverse_of(a.n_heads / a.n_kv_heads);
    a.n_rows = static_cast<int>(q.ne[1]);
    a.n_streams = static_cast<int>(q.ne[3]);
    a.n_cells = static_cast<int>(k.ne[1]);
    a.n_chunks = n_chunks_of(k.ne[1], a.n_kv_heads, a.head_dim);
    std::memcpy(&a.scale, t.op_params, sizeof(float));
    std::memcpy(&a.soft_cap, t.op_params + 2, sizeof(float));
    made.query_blocks = blocks_of(static_cast<int64_t>(a.n_rows) * (a.n_heads / a.n_kv_heads),
                                  made.kernel.groups * few_rows::GROUP_QUERIES);
    scratch_floats =
        static_cast<size_t>(a.n_streams) * a.n_rows * a.n_heads * a.n_chunks * (a.head_dim / 2 + 2);
    return made;
}

few_rows::attention with_scratch(const few_rows_plan::attention & planned, float * scratch,
                                 unsigned char * converted) {
    few_rows::attention a = planned.arguments;
    a.means = reinterpret_cast<unsigned short *>(scratch);
    a.totals = scratch + static_cast<size_t>(a.n_streams) * a.n_rows * a.n_heads * a.n_chunks *
                             a.head_dim / 2;
    a.converted = planned.converts ? converted : nullptr;
    return a;
}

}  // namespace dflash
