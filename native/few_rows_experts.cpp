#include "few_rows_experts.h"

#include <cstring>

#include "few_rows_groups.h"

namespace dflash {

namespace {

few_rows_kernel kernel_of(const ggml_tensor & weights) {
    const auto o = operand_of(weights);
    return {o, o, 1, true};
}

// A row's experts are rarely those of another: parts are as good as they can be for so many.
constexpr int usual_rows = 8;

size_t floats(size_t bytes) { return bytes / sizeof(float); }

bool is_readable_bias(const expert_chain & c, const few_rows_rules & rules) {
    if (c.bias == nullptr) {
        return true;
    }
    const ggml_tensor &w = *c.product->src[0], &bias = *c.bias->src[1];
    return bias.type == GGML_TYPE_F32 && bias.op == GGML_OP_NONE && bias.view_src == nullptr &&
           bias.ne[0] == w.ne[1] && bias.ne[1] == w.ne[2] && ggml_is_contiguous(&bias) &&
           c.bias->src[2] == c.product->src[2] && rules.reads(bias);
}

}  // namespace

bool takes_experts(const ggml_tensor & t, const few_rows_rules & rules) {
    if (t.op != GGML_OP_MUL_MAT_ID || !is_computed(t) || !rules.takes_experts) {
        return false;
    }
    const ggml_tensor &w = *t.src[0], &x = *t.src[1], &ids = *t.src[2];
    const int64_t n_used = ids.ne[0], n_rows = ids.ne[1];
    return are_readable_experts(w, rules) && w.ne[2] <= few_rows::MAX_EXPERTS &&
           x.type == GGML_TYPE_F32 && x.nb[0] == sizeof(float) && x.ne[3] == 1 &&
           is_aligned(x.data, x.nb[1] | x.nb[2], 16) &&
           (x.ne[1] == 1 || (x.ne[1] == n_used && x.nb[2] == x.nb[1] * n_used)) &&
           x.ne[2] == n_rows && n_rows >= 1 && n_rows <= few_rows::MAX_COLUMNS &&
           n_rows * n_used <= few_rows::MAX_PAIRS && ids.type == GGML_TYPE_I32 &&
           ids.nb[0] == sizeof(int) && ids.ne[2] == 1 && ids.ne[3] == 1 &&
           t.type == GGML_TYPE_F32 && t.nb[0] == sizeof(float) &&
           is_aligned(t.data, t.nb[1] | t.nb[2], sizeof(float)) && rules.has(kernel_of(w)) &&
           rules.takes_experts(w.type, w.ne[0], w.ne[1], n_rows);
}

bool is_readable_plain(const ggml_tensor & w, const few_rows_rules & rules) {
    return w.type == GGML_TYPE_F32 && is_matrix(w) && ggml_is_contiguous(&w) &&
           w.op == GGML_OP_NONE && w.view_src == nullptr && w.ne[0] % 4 == 0 &&
           is_aligned(w.data, w.nb[1], 16) && rules.reads(w);
}

bool takes_plain(const ggml_tensor & t, const few_rows_rules & rules) {
    if (t.op != GGML_OP_MUL_MAT || !is_computed(t) || !is_readable_plain(*t.src[0], rules)) {
        return false;
    }
    const ggml_tensor &w = *t.src[0], &x = *t.src[1];
    return is_float_matrix(x) && is_float_matrix(t) &&
           is_aligned(x.data, x.ne[1] > 1 ? x.nb[1] : 0, 16) && x.ne[1] >= 1 &&
           x.ne[1] <= few_rows::MAX_COLUMNS && rules.is_faster(w.type, w.ne[0], w.ne[1], x.ne[1]);
}

void add_plain(few_rows_plan::plain & made, const ggml_tensor & t) {
    const ggml_tensor &w = *t.src[0], &x = *t.src[1];
    few_rows::plain_product & p = made.arguments;
    few_rows::plain_matrix & m = p.matrices[made.nodes.size()];
    m.weights = static_cast<const float *>(w.data);
    m.row = floats(w.nb[1]);
    m.out = static_cast<float *>(t.data);
    m.out_stride = floats(t.nb[1]);
    m.rows = static_cast<int>(w.ne[1]);
    p.x = static_cast<const float *>(x.data);
    p.x_stride = floats(x.nb[1]);
    p.k = static_cast<int>(w.ne[0]);
    p.n_columns = static_cast<int>(x.ne[1]);
    made.nodes.push_back(&t);
}

few_rows_plan::experts plan_experts(const ggml_tensor & t, const few_rows_rules & rules) {
    const ggml_tensor &w = *t.src[0], &x = *t.src[1], &ids = *t.src[2];
    few_rows_plan::experts made;
    made.node = &t;
    made.kernel = kernel_of(w);
    few_rows::choice & c = made.choice;
    c.ids = static_cast<const int *>(ids.data);
    c.ids_row = ids.nb[1] / sizeof(int);
    c.n_rows = static_cast<int>(ids.ne[1]);
    c.n_used = static_cast<int>(ids.ne[0]);
    c.n_experts = static_cast<int>(w.ne[2]);
    few_rows::expert_product & e = made.arguments;
    e.n_used = c.n_used;
    e.n_inputs = static_cast<int>(x.ne[1]);
    e.expert_bytes = w.nb[2];
    e.out_row = floats(t.nb[2]);
    few_rows::product & p = e.base;
    p.k = static_cast<int>(w.ne[0]);
    p.n_matrices = 1;
    few_rows::matrix & m = p.matrices[0];
    m.weights = static_cast<const unsigned char *>(w.data);
    m.row_bytes = w.nb[1];
    m.rows = static_cast<int>(w.ne[1]);
    m.out = static_cast<float *>(t.data);
    m.out_stride = floats(t.nb[1]);

    few_rows::conversion & i = made.input;
    i.x = static_cast<const float *>(x.data);
    i.stride = floats(x.ne[1] == 1 ? x.nb[2] : x.nb[1]);
    i.k = p.k;
    i.n_columns = c.n_rows * e.n_inputs;
    i.n_tiles = e.n_tiles = blocks_of(i.n_columns, few_rows::TILE_COLUMNS);

    const int units = blocks_of(p.k, few_rows::UNIT);
    made.row_blocks = blocks_of(m.rows, few_rows::BLOCK_ROWS);
    // Whatever the rows, so that the bits are those of one.
    p.units_per_part =
        few_rows_units_per_part(made.row_blocks * c.n_used * usual_rows, units, rules.n_processors);
    made.parts = blocks_of(units, p.units_per_part);
    made.items = few_rows::most_items(c.n_rows * c.n_used, c.n_experts);
    return made;
}

bool may_share(const expert_chain & gate, const expert_chain & up, const ggml_tensor & activation,
               const few_rows_rules & rules) {
    const ggml_tensor &a = *gate.product, &b = *up.product, &t = activation;
    return a.src[1] == b.src[1] && a.src[2] == b.src[2] && a.src[0]->type == b.src[0]->type &&
           ggml_are_same_shape(a.src[0], b.src[0]) &&
           (gate.bias == nullptr) == (up.bias == nullptr) && is_readable_bias(gate, rules) &&
           is_readable_bias(up, rules) && takes_experts(a, rules) && takes_experts(b, rules) &&
           is_computed(t) && t.type == GGML_TYPE_F32 && ggml_are_same_shape(&t, &a) &&
           ggml_is_contiguous(&t) && is_aligned(t.data, t.nb[1], sizeof(float));
}

// Parts are those of the products alone, so that a row has the same bits where memory forbids this.
few_rows_plan::experts plan_experts(const expert_chain & gate, const expert_chain & up,
                                    const ggml_tensor & activation, const few_rows_rules & rules) {
    few_rows_plan::experts made = plan_experts(*gate.product, rules);
    few_rows::product & p = made.arguments.base;
    p.n_matrices = 2;
    p.activation = activation_of(activation);
    std::memcpy(&p.alpha, activation.op_params + 2, sizeof(float));
    std::memcpy(&p.limit, activation.op_params + 3, sizeof(float));
    p.matrices[0].out = static_cast<float *>(activation.data);
    p.matrices[0].out_stride = floats(activation.nb[1]);
    p.matrices[1] = p.matrices[0];
    p.matrices[1].weights = static_cast<const unsigned char *>(up.product->src[0]->data);
    made.arguments.out_row = floats(activation.nb[2]);
    const expert_chain * chains[] = {&gate, &up};
    for (int i = 0; i < 2; i++) {
        made.before.push_back(chains[i]->product);
        if (chains[i]->bias != nullptr) {
            made.before.push_back(chains[i]->bias);
            const ggml_tensor & bias = *chains[i]->bias->src[1];
            p.matrices[i].bias = static_cast<const float *>(bias.data);
            made.arguments.expert_bias = floats(bias.nb[1]);
        }
    }
    made.row_blocks = blocks_of(p.matrices[0].rows, few_rows::BLOCK_ROWS / 2);
    made.node = &activation;
    return made;
}

bool takes_bias(const expert_chain & c, const few_rows_rules & rules) {
    const ggml_tensor & t = *c.bias;
    return is_readable_bias(c, rules) && takes_experts(*c.product, rules) && is_computed(t) &&
           t.type == GGML_TYPE_F32 && ggml_is_contiguous(&t) && is_aligned(t.data, t.nb[1], 4);
}

few_rows_plan::experts plan_experts(const expert_chain & c, const few_rows_rules & rules) {
    few_rows_plan::experts made = plan_experts(*c.product, rules);
    few_rows::matrix & m = made.arguments.base.matrices[0];
    const ggml_tensor & bias = *c.bias->src[1];
    m.bias = static_cast<const float *>(bias.data);
    made.arguments.expert_bias = floats(bias.nb[1]);
    m.out = static_cast<float *>(c.bias->data);
    m.out_stride = floats(c.bias->nb[1]);
    made.arguments.out_row = floats(c.bias->nb[2]);
    made.before = {c.product};
    made.node = c.bias;
    return made;
}

}  // namespace dflash
