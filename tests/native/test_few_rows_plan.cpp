// Which nodes of a graph our kernels take, in which launches: on graphs made by hand, whose tensors
// get addresses but no memory.

#include <algorithm>
#include <map>

#include "backend.h"
#include "check.h"
#include "few_rows_groups.h"
#include "few_rows_plan.h"
#include "graph_content.h"

namespace {

using namespace dflash;

constexpr int k = 512;

class drawn {
  public:
    explicit drawn(int n_columns) : columns(n_columns), context_(new_nodes(128)) {
        graph = ggml_new_graph_custom(context_.get(), 128, false);
        x = input(k);
    }

    ggml_tensor * weights(int rows, ggml_type type = GGML_TYPE_Q4_K, int length = k) {
        return placed(ggml_new_tensor_2d(context_.get(), type, length, rows));
    }
    ggml_tensor * bias(int rows) {
        return placed(ggml_new_tensor_1d(context_.get(), GGML_TYPE_F32, rows));
    }
    ggml_tensor * input(int length) {
        ggml_tensor * t = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, length, columns);
        inputs_.push_back(t);
        return placed(t);
    }
    // A node at an address of its own, or at that of another tensor.
    ggml_tensor * node(ggml_tensor * t, const ggml_tensor * at = nullptr) {
        if (t->view_src == nullptr) {
            placed(t);
        }
        if (at != nullptr) {
            t->data = at->data;
        }
        ggml_build_forward_expand(graph, t);
        return t;
    }
    ggml_tensor * product(ggml_tensor * w, ggml_tensor * of = nullptr) {
        return node(ggml_mul_mat(ctx(), w, of != nullptr ? of : x));
    }
    ggml_context * ctx() const { return context_.get(); }
    private_abi::graph & layout() const { return private_abi::of(graph); }

    few_rows_rules rules() const {
        few_rows_rules rules;
        rules.reads = [this](const ggml_tensor & t) {
            return t.op == GGML_OP_NONE &&
                   std::find(inputs_.begin(), inputs_.end(), &t) == inputs_.end();
        };
        rules.has = [](const few_rows_kernel &) { return true; };
        rules.is_faster = [](ggml_type, int64_t, int64_t, int64_t) { return true; };
        rules.attends = [](const few_rows_attention_kernel &) { return true; };
        rules.n_processors = 132;
        return rules;
    }
    few_rows_plan plan() const { return plan_few_rows(layout(), rules()); }

    int columns;
    ggml_cgraph * graph;
    ggml_tensor * x;

    ggml_tensor * placed(ggml_tensor * t) {
        t->data = reinterpret_cast<void *>(next_);
        next_ += (ggml_nbytes(t) + 255) / 256 * 256;
        return t;
    }

  private:
    ggml_context_ptr context_;
    std::vector<const ggml_tensor *> inputs_;
    uintptr_t next_ = 1 << 20;
};

size_t n_launches(const drawn & d) { return d.plan().launches.size(); }

// What runs, in order: A for attention, with a c if it converts its result; M matrices, a for an
// activation, c for a conversion before, n for one with its norm, P for products of floats, and s
// for a segment of so many nodes.
std::string steps(const few_rows_plan & plan) {
    std::string text;
    for (const few_rows_plan::step & s : plan.steps) {
        if (s.kind == few_rows_plan::step::ATTENTION) {
            text += plan.attentions[s.index].converts ? "Ac " : "A ";
        } else if (s.kind == few_rows_plan::step::PLAIN) {
            text += "P" + std::to_string(plan.plains[s.index].nodes.size()) + " ";
        } else if (s.kind == few_rows_plan::step::LAUNCH) {
            const few_rows_plan::launch & l = plan.launches[s.index];
            text += (l.normalizes ? "n"
                     : l.converts ? "c"
                                  : "") +
                    std::string("M") + std::to_string(l.product.n_matrices) +
                    (l.product.activation != 0 ? "a " : " ");
        } else {
            const few_rows_plan::segment & g = plan.segments[s.index];
            text += "s" + std::to_string(g.end - g.begin) + " ";
        }
    }
    return text;
}

void expect(const drawn & d, const std::string & expected) {
    const std::string found = steps(d.plan());
    check::equal(found, expected, "steps are " + found + "not " + expected);
}

ggml_tensor * other_work(drawn & d, ggml_tensor * of, const ggml_tensor * at = nullptr) {
    return d.node(ggml_rms_norm(d.ctx(), of, 1e-6f), at);
}

void one_input_is_converted_and_multiplied_once() {
    drawn d(5);
    ggml_tensor * q = d.product(d.weights(256));
    other_work(d, q);
    ggml_tensor * key = d.product(d.weights(64));
    other_work(d, key);
    d.product(d.weights(64, GGML_TYPE_Q6_K));
    expect(d, "cM3 s2 ");
    const few_rows_plan plan = d.plan();
    check::equal(plan.launches[0].kernel.name(), std::string("product_Q4_K_Q6_K_U_1"), "kernel");
    check::equal(plan.launches[0].row_blocks, 4, "blocks of rows");
}

void a_third_type_or_a_fourth_matrix_takes_another_launch() {
    drawn types(1);
    for (const ggml_type type : {GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, GGML_TYPE_Q8_0}) {
        types.product(types.weights(64, type));
    }
    expect(types, "cM2 M1 ");
    drawn four(1);
    for (int i = 0; i < 4; i++) {
        four.product(four.weights(64));
    }
    expect(four, "cM3 M1 ");
}

// Floats have no blocks that could end in a row's midst, so any length will do.
void floats_of_16_bits_are_multiplied() {
    drawn d(5);
    ggml_tensor * x = d.input(288);
    d.product(d.weights(200, GGML_TYPE_BF16, 288), x);
    d.product(d.weights(64, GGML_TYPE_F16, 288), x);
    expect(d, "cM2 ");
    const few_rows_plan plan = d.plan();
    check::equal(plan.launches[0].kernel.name(), std::string("product_F16_BF16_1"), "kernel");
    check::equal(plan.launches[0].kernel.shared_bytes(),
                 few_rows::INPUT_STAGES * few_rows::TILE_BYTES, "no ring of weights");
    drawn off(5);
    ggml_tensor * w = off.weights(64, GGML_TYPE_BF16, 288);
    w->data = static_cast<char *>(w->data) + 8;
    off.product(w, off.input(288));
    few_rows_rules rules = off.rules();
    rules.has = [](const few_rows_kernel & kernel) { return kernel.a.aligned && kernel.b.aligned; };
    check::that(plan_few_rows(off.layout(), rules).launches.empty(), "floats off 16 bytes");
}

void what_is_not_ours_stays_with_ggml() {
    drawn many(65);
    many.product(many.weights(64));
    expect(many, "s1 ");
    drawn other(2);
    other.product(other.weights(64, GGML_TYPE_TQ1_0));
    ggml_tensor * view = ggml_view_2d(other.ctx(), other.weights(64), k, 32, 288, 0);
    other.node(view);
    other.product(view);
    expect(other, "s3 ");
    drawn skipped(2);
    skipped.product(skipped.weights(64))->flags &= ~GGML_TENSOR_FLAG_COMPUTE;
    check::equal(n_launches(skipped), size_t{0}, "a node that ggml skips");
    drawn slower(2);
    slower.product(slower.weights(64));
    few_rows_rules rules = slower.rules();
    rules.is_faster = [](ggml_type, int64_t, int64_t, int64_t) { return false; };
    check::that(plan_few_rows(slower.layout(), rules).launches.empty(), "ggml's is the faster");
}

ggml_tensor * gated(drawn & d, ggml_tensor ** gate = nullptr) {
    ggml_tensor * up = d.product(d.weights(96));
    ggml_tensor * g = d.product(d.weights(96));
    if (gate != nullptr) {
        *gate = g;
    }
    return d.node(ggml_swiglu_split(d.ctx(), g, up));
}

void gate_and_up_are_fused_with_their_activation() {
    drawn d(3);
    const ggml_tensor * out = gated(d);
    expect(d, "cM2a ");
    const few_rows_plan plan = d.plan();
    const few_rows::product & p = plan.launches[0].product;
    check::equal<const void *>(p.matrices[0].out, out->data, "the result's place");
    check::equal<const void *>(p.matrices[0].weights, out->src[0]->src[0]->data, "the gate first");
    check::equal(plan.launches[0].row_blocks, 2, "blocks of 64 rows of both");

    drawn limited(3);
    ggml_tensor * up = limited.product(limited.weights(96));
    ggml_tensor * with_bias = limited.node(ggml_add(limited.ctx(), up, limited.bias(96)));
    ggml_tensor * gate = limited.product(limited.weights(96));
    limited.node(ggml_swiglu_oai(limited.ctx(), gate, with_bias, 1.5f, 6.0f));
    expect(limited, "cM2a ");
    const few_rows_plan of_limited = limited.plan();
    const few_rows::product & q = of_limited.launches[0].product;
    check::that(q.alpha == 1.5f && q.limit == 6.0f, "alpha and limit");
    check::that(q.matrices[0].bias == nullptr && q.matrices[1].bias != nullptr, "bias of up");
}

void halves_of_one_matrix_are_gate_and_up() {
    for (const bool is_swapped : {false, true}) {
        drawn d(3);
        ggml_tensor * w = d.weights(200);
        ggml_tensor * both = d.node(ggml_add(d.ctx(), d.product(w), d.bias(200)));
        d.node(is_swapped ? ggml_geglu_swapped(d.ctx(), both) : ggml_geglu(d.ctx(), both));
        expect(d, "cM2a ");
        const few_rows_plan plan = d.plan();
        const few_rows::matrix * m = plan.launches[0].product.matrices;
        check::equal(m[0].rows, 100, "rows of the gate");
        check::that(m[!is_swapped].weights - m[is_swapped].weights ==
                        static_cast<ptrdiff_t>(100 * w->nb[1]),
                    "where its rows are");
        check::that(m[!is_swapped].bias - m[is_swapped].bias == 100, "where its bias is");
    }
}

void what_others_see_is_not_fused_away() {
    drawn used(3);
    ggml_tensor * gate = nullptr;
    gated(used, &gate);
    other_work(used, gate);
    expect(used, "cM2 s2 ");
    drawn output(3);
    gated(output, &gate);
    ggml_set_output(gate);
    expect(output, "cM2 s1 ");
    drawn viewed(3);
    gated(viewed, &gate);
    viewed.node(ggml_view_1d(viewed.ctx(), gate, 4, 0));
    expect(viewed, "cM2 s2 ");
}

void bias_and_residual_are_fused() {
    drawn d(3);
    ggml_tensor * before = d.input(96);
    ggml_tensor * y = d.product(d.weights(96));
    y = d.node(ggml_add(d.ctx(), y, d.bias(96)));
    y = d.node(ggml_add(d.ctx(), before, y), before);  // in its place
    expect(d, "cM1 ");
    const few_rows_plan plan = d.plan();
    const few_rows::matrix & m = plan.launches[0].product.matrices[0];
    check::that(m.bias != nullptr && m.residuals[0] == before->data && m.out == m.residuals[0] &&
                    m.residuals[1] == nullptr,
                "fused");
}

// A router, and a shared expert with its gate, which llama.cpp has behind the expert.
struct shared_expert {
    explicit shared_expert(drawn & d) {
        ggml_context * ctx = d.ctx();
        of_others = d.input(96);
        before = d.input(96);
        other_work(d, d.product(d.weights(16, GGML_TYPE_F32)));
        ggml_tensor * y = d.product(d.weights(96));
        gate = d.product(d.weights(1, GGML_TYPE_F32));
        y = d.node(ggml_mul(ctx, y, d.node(ggml_sigmoid(ctx, gate))));
        y = d.node(ggml_add(ctx, of_others, y), of_others);
        out = d.node(ggml_add(ctx, y, before), of_others);
    }
    ggml_tensor *of_others, *before, *gate, *out;
};

void a_shared_expert_is_gated_and_added_where_it_is_multiplied() {
    drawn d(3);
    const shared_expert e(d);
    expect(d, "P1 s1 cM1 P1 s4 ");
    check::that(order_few_rows(d.layout(), d.rules()), "the gate comes with the router");
    expect(d, "P2 s1 cM1 ");
    const few_rows_plan plan = d.plan();
    const few_rows::matrix & m = plan.launches[0].product.matrices[0];
    check::that(m.gate == e.gate->data && m.residuals[0] == e.of_others->data &&
                    m.residuals[1] == e.before->data && m.out == e.out->data,
                "what goes into it");
    check::equal(plan.plains[0].arguments.matrices[1].rows, 1, "the gate's row");
    drawn over(3);
    const shared_expert lost(over);
    order_few_rows(over.layout(), over.rules());
    lost.out->data = lost.gate->data;
    expect(over, "P2 s1 cM1 s1 ");
}

void a_residual_that_comes_later_or_lies_askew_is_not_fused() {
    drawn late(3);
    ggml_tensor * y = late.product(late.weights(k));
    ggml_tensor * other = other_work(late, late.x);
    late.node(ggml_add(late.ctx(), y, other));
    expect(late, "cM1 s2 ");
    drawn askew(3);
    ggml_tensor * before = askew.input(96);
    ggml_tensor * sum = askew.node(ggml_add(askew.ctx(), askew.product(askew.weights(96)), before));
    sum->data = static_cast<char *>(before->data) + 128;
    expect(askew, "cM1 s1 ");
}

void an_input_is_converted_again_once_it_changed() {
    drawn d(2);
    ggml_tensor * a = d.product(d.weights(k));
    ggml_tensor * b = other_work(d, a, d.x);  // takes the place of x
    d.product(d.weights(64), b);
    expect(d, "cM1 s1 cM1 ");
    drawn changed(2);
    changed.product(changed.weights(64));
    changed.node(ggml_scale_inplace(changed.ctx(), changed.x, 2.0f));
    changed.product(changed.weights(64));
    expect(changed, "cM1 s1 cM1 ");
}

ggml_tensor * normed(drawn & d, ggml_tensor * of) {
    ggml_tensor * norm = d.node(ggml_rms_norm(d.ctx(), of, 1e-5f));
    return d.node(ggml_mul(d.ctx(), norm, d.bias(k)));
}

void the_norm_before_a_product_is_fused_with_the_conversion() {
    drawn d(3);
    ggml_tensor * before = other_work(d, d.x);
    ggml_tensor * x = normed(d, before);
    d.product(d.weights(64), x);
    other_work(d, x);
    d.product(d.weights(300), x);
    expect(d, "s1 nM2 s1 ");
    const few_rows_plan plan = d.plan();
    const few_rows::normalization & n = plan.launches[0].input;
    check::that(n.epsilon == 1e-5f && n.normal == x->data && n.input.x == before->data &&
                    n.weight == x->src[1]->data,
                "what is normed");
    drawn twice(3);
    x = normed(twice, twice.x);
    twice.product(twice.weights(64, GGML_TYPE_Q4_K), x);
    twice.product(twice.weights(64, GGML_TYPE_Q8_0), x);
    twice.product(twice.weights(64, GGML_TYPE_Q6_K), x);
    expect(twice, "nM2 M1 ");
    drawn seen(3);
    x = normed(seen, seen.x);
    other_work(seen, x->src[0]);
    seen.product(seen.weights(64), x);
    expect(seen, "s3 cM1 ");
    drawn askew(3);
    x = normed(askew, askew.x);
    x->data = static_cast<char *>(askew.x->data) + 64;
    askew.product(askew.weights(64), x);
    expect(askew, "s2 cM1 ");
}

void nothing_moves_over_what_is_in_use() {
    drawn read(2);
    ggml_tensor * first = read.product(read.weights(64));
    other_work(read, first);
    read.product(read.weights(64))->data = first->data;  // free by then, and not before
    expect(read, "cM1 s1 M1 ");
    const int units = read.plan().launches[0].product.units_per_part;
    drawn apart(2);
    other_work(apart, apart.product(apart.weights(64)));
    apart.product(apart.weights(64));
    expect(apart, "cM2 s1 ");
    check::equal(apart.plan().launches[0].product.units_per_part, units,
                 "sums depend on where ggml puts results");
}

void products_of_one_input_are_put_side_by_side() {
    drawn d(2);
    ggml_tensor * first = d.product(d.weights(64));
    ggml_tensor * norm = other_work(d, first);
    ggml_tensor * second = d.product(d.weights(64));
    ggml_tensor * with_bias = d.node(ggml_add(d.ctx(), second, d.bias(64)));
    for (int i = 0; i < 2; i++) {
        check::equal(order_few_rows(d.layout(), d.rules()), i == 0, "moved once");
        const std::vector<ggml_tensor *> expected = {first, second, with_bias, norm};
        check::that(std::equal(expected.begin(), expected.end(), d.layout().nodes), "order");
    }
    // ggml gives graphs of as many nodes the places of the first one: the order must be the same.
    drawn wide(512);
    other_work(wide, wide.product(wide.weights(64)));
    wide.product(wide.weights(64));
    check::that(order_few_rows(wide.layout(), wide.rules()), "the same for any columns");
    drawn changed(2);
    changed.product(changed.weights(64));
    changed.node(ggml_scale_inplace(changed.ctx(), changed.x, 2.0f));
    changed.product(changed.weights(64));
    check::that(!order_few_rows(changed.layout(), changed.rules()), "the input changes between");
}

void the_order_of_a_graph_that_is_built_again_is_known() {
    drawn d(2);
    ggml_tensor * first = d.product(d.weights(64));
    ggml_tensor * norm = other_work(d, first);
    ggml_tensor * second = d.product(d.weights(64));
    const std::vector<ggml_tensor *> built = {first, norm, second}, moved = {first, second, norm};
    known_orders known;
    for (int i = 0; i < 2; i++) {
        std::copy(built.begin(), built.end(), d.layout().nodes);
        known.order(d.layout(), d.rules());
        check::that(std::equal(moved.begin(), moved.end(), d.layout().nodes), "order");
    }
    second->src[1] = norm;  // another graph at the same addresses
    std::copy(built.begin(), built.end(), d.layout().nodes);
    known.order(d.layout(), d.rules());
    check::that(std::equal(built.begin(), built.end(), d.layout().nodes), "an old order");
}

void an_order_is_known_by_sources_behind_one_that_is_left_out() {
    drawn d(2);
    ggml_tensor * first = d.product(d.weights(64));
    ggml_tensor * norm = other_work(d, first);
    ggml_tensor * second = d.product(d.weights(64));
    ggml_tensor * with_bias = d.node(ggml_add(d.ctx(), second, d.bias(64)));
    ggml_tensor * last = other_work(d, with_bias);
    const std::vector<ggml_tensor *> built = {first, norm, second, with_bias, last};
    known_orders known;
    const auto is_ordered = [&](const std::vector<ggml_tensor *> & expected) {
        std::copy(built.begin(), built.end(), d.layout().nodes);
        known.order(d.layout(), d.rules());
        return std::equal(expected.begin(), expected.end(), d.layout().nodes);
    };
    check::that(is_ordered({first, second, with_bias, norm, last}), "a product and its bias");
    last->src[3] = second;  // others see it without its bias
    check::that(is_ordered({first, second, norm, with_bias, last}), "a product alone");
}

void parts_depend_on_shapes_alone() {
    std::map<int, int> tiles;
    int units = 0;
    for (const int n : {1, 8, 9, 16, 17, 32, 33, 64}) {
        drawn d(n);
        d.product(d.weights(4096, GGML_TYPE_Q4_K, k));
        const few_rows_plan plan = d.plan();
        const few_rows_plan::launch & l = plan.launches[0];
        check::that(units == 0 || units == l.product.units_per_part, "units of a part");
        units = l.product.units_per_part;
        tiles[n] = l.kernel.tiles * 10 + l.layers;
    }
    const std::map<int, int> expected = {{1, 11},  {8, 11},  {9, 21},  {16, 21},
                                         {17, 41}, {32, 41}, {33, 42}, {64, 42}};
    check::that(tiles == expected, "tiles and layers");
    for (const int row_blocks : {1, 8, 32, 96, 1187}) {
        for (const int n : {1, 2, 16, 48, 107}) {
            const int part = few_rows_units_per_part(row_blocks, n, 132);
            check::that(part >= 1 && part <= n, "a part is of some of the units");
        }
    }
}

void kernels_that_do_not_fit_give_way_to_smaller_ones() {
    drawn d(64);
    d.product(d.weights(64));
    few_rows_rules rules = d.rules();
    rules.has = [](const few_rows_kernel & kernel) { return kernel.tiles < 4; };
    const few_rows_plan plan = plan_few_rows(d.layout(), rules);
    check::equal(plan.launches[0].kernel.tiles, 2, "tiles");
    check::equal(plan.launches[0].layers, 4, "layers");
    check::equal(plan.n_counters, size_t{4}, "a counter for each block of rows and layer");
}

// Gate and up of experts, with biases or without, and their activation.
struct mixture {
    explicit mixture(drawn & d, bool has_bias = false) {
        ggml_context * ctx = d.ctx();
        d.product(d.weights(64));  // an input of its own for all others
        x = d.placed(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, k, 1, d.columns));
        ids = d.placed(ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 4, d.columns));
        ggml_tensor * of[2];
        for (auto & out : of) {
            ggml_tensor * w = d.placed(ggml_new_tensor_3d(ctx, GGML_TYPE_Q4_K, k, 128, 16));
            out = d.node(ggml_mul_mat_id(ctx, w, x, ids));
            if (has_bias) {
                ggml_tensor * bias = d.placed(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 128, 16));
                out = d.node(ggml_add_id(ctx, out, bias, ids));
            }
        }
        up = of[0];
        out = d.node(has_bias ? ggml_swiglu_oai(ctx, of[1], of[0], 1.702f, 7.0f)
                              : ggml_swiglu_split(ctx, of[1], of[0]));
    }
    static few_rows_plan plan(const drawn & d) {
        few_rows_rules rules = d.rules();
        rules.takes_experts = [](ggml_type, int64_t, int64_t, int64_t) { return true; };
        return plan_few_rows(d.layout(), rules);
    }
    ggml_tensor *x, *ids, *up, *out;
};

void gate_and_up_of_experts_are_fused_with_their_activation() {
    for (const bool has_bias : {false, true}) {
        drawn d(5);
        const mixture m(d, has_bias);
        const few_rows_plan plan = mixture::plan(d);
        check::equal(plan.of_experts.size(), size_t{1}, "one launch");
        const few_rows_plan::experts & made = plan.of_experts[0];
        check::that(made.node == m.out, "its result");
        check::equal(made.before.size(), has_bias ? size_t{4} : size_t{2}, "what it is made of");
        check::equal(made.row_blocks, 2, "blocks of 64 rows");
        const few_rows::product & p = made.arguments.base;
        check::that(p.matrices[0].out == m.out->data, "where it goes");
        check::that(p.matrices[1].weights == (has_bias ? m.up->src[0] : m.up)->src[0]->data, "up");
        check::that((p.matrices[1].bias != nullptr) == has_bias, "a bias");
        check::that(made.orders && made.converts, "before it");
        drawn other(1);
        const mixture one(other, has_bias);
        check::equal(mixture::plan(other).of_experts[0].arguments.base.units_per_part,
                     p.units_per_part, "parts depend on shapes alone");
    }
    drawn seen(5);
    const mixture m(seen);
    seen.node(ggml_scale(seen.ctx(), m.up, 2.0f));
    check::equal(mixture::plan(seen).of_experts.size(), size_t{2}, "others see what goes in");
    drawn changed(5);
    const mixture late(changed);
    auto & nodes = changed.layout().nodes;
    ggml_tensor * over = ggml_rms_norm(changed.ctx(), changed.x, 1e-6f);
    changed.node(over, late.x);
    std::rotate(&nodes[changed.layout().n_nodes - 2], &nodes[changed.layout().n_nodes - 1],
                &nodes[changed.layout().n_nodes]);
    check::equal(mixture::plan(changed).of_experts.size(), size_t{2}, "the input is gone");
}

void a_product_with_experts_takes_its_bias_along() {
    drawn d(5);
    mixture m(d, true);
    ggml_context * ctx = d.ctx();
    ggml_tensor * w = d.placed(ggml_new_tensor_3d(ctx, GGML_TYPE_Q8_0, 128, k, 16));
    ggml_tensor * bias = d.placed(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, k, 16));
    ggml_tensor * down = d.node(ggml_mul_mat_id(ctx, w, m.out, m.ids));
    ggml_tensor * sum = d.node(ggml_add_id(ctx, down, bias, m.ids));
    const few_rows_plan plan = mixture::plan(d);
    check::equal(plan.of_experts.size(), size_t{2}, "gate with up, and down");
    const few_rows_plan::experts & made = plan.of_experts[1];
    check::that(made.node == sum && made.before == std::vector<const ggml_tensor *>{down},
                "what it does");
    const few_rows::expert_product & e = made.arguments;
    check::that(e.base.matrices[0].bias == bias->data && e.expert_bias == k, "the bias");
    check::that(e.base.matrices[0].out == sum->data, "where it goes");
    check::that(made.converts && !made.orders, "the same choice");
    drawn seen(5);
    mixture other(seen, true);
    down = seen.node(ggml_mul_mat_id(
        seen.ctx(), seen.placed(ggml_new_tensor_3d(seen.ctx(), GGML_TYPE_Q8_0, 128, k, 16)),
        other.out, other.ids));
    seen.node(ggml_add_id(seen.ctx(), down,
                          seen.placed(ggml_new_tensor_2d(seen.ctx(), GGML_TYPE_F32, k, 16)),
                          other.ids));
    seen.node(ggml_scale(seen.ctx(), down, 2.0f));
    check::that(mixture::plan(seen).of_experts[1].before.empty(), "others see it without");
}

void graphs_of_equal_content_are_equal() {
    const auto made = [](int n, bool other_address = false, float eps = 1e-6f) {
        drawn d(n);
        ggml_tensor * y = d.product(d.weights(64));
        if (other_address) {
            y->data = static_cast<char *>(y->data) + 256;
        }
        d.node(ggml_rms_norm(d.ctx(), y, eps));
        return graph_content(d.layout());
    };
    check::that(made(2) == made(2) && made(2).hash() == made(2).hash(), "equal graphs");
    check::that(!(made(2) == made(3)), "another shape");
    check::that(!(made(2) == made(2, true)), "another address");
    check::that(!(made(2) == made(2, false, 1e-5f)), "another parameter");
}

void ggml_is_laid_out_as_expected() {
    check::equal(private_abi::doubt_graphs(), std::string(), "graphs");
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    check::equal(private_abi::doubt_device(device), std::string(), "devices");
    const ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    check::equal(private_abi::doubt_backend(backend.get()), std::string(), "backends");
}

// Attention of eight heads of 64 on two, over 512 cells.
struct attended {
    explicit attended(drawn & d, ggml_type type = GGML_TYPE_F16, int head_dim = 64) {
        ggml_context * ctx = d.ctx();
        const auto cache = [&] {
            return ggml_permute(ctx, d.placed(ggml_new_tensor_3d(ctx, type, head_dim, 2, 512)), 0,
                                2, 1, 3);
        };
        ggml_tensor * q = d.placed(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, head_dim, 8, d.columns));
        ggml_tensor * mask = d.placed(ggml_new_tensor_2d(ctx, GGML_TYPE_F16, 512, d.columns));
        result = d.node(ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), cache(), cache(),
                                            mask, 0.125f, 0.0f, 0.0f));
        rows = d.node(ggml_reshape_2d(ctx, result, 8 * head_dim, d.columns));
    }
    ggml_tensor *result, *rows;
};

void attention_makes_the_input_of_the_product_behind_it() {
    drawn d(5);
    const attended a(d);
    d.product(d.weights(256), a.rows);
    expect(d, "Ac M1 ");
    const few_rows_plan plan = d.plan();
    const few_rows::attention & of = plan.attentions[0].arguments;
    check::equal(plan.attentions[0].kernel.name(), std::string("attention_F16_F16_64_2"), "kernel");
    check::equal(of.n_chunks, 8, "chunks of 64 cells");
    check::equal(of.n_tiles, 1, "tiles of eight columns");
    check::that(plan.partial_floats >= size_t{5} * 8 * 8 * (64 / 2 + 2), "scratch");
}

void an_input_that_is_changed_behind_attention_is_converted_anew() {
    drawn d(5);
    const attended a(d);
    other_work(d, a.rows, a.rows);
    d.product(d.weights(256), a.rows);
    expect(d, "A s2 cM1 ");
}

void attention_of_other_kinds_is_left_to_ggml() {
    drawn long_pass(65), odd_head(5), other_cache(5), left(5);
    const attended a(long_pass), b(odd_head, GGML_TYPE_F16, 72), c(other_cache, GGML_TYPE_Q4_0),
        e(left);
    check::equal(long_pass.plan().attentions.size(), size_t{0}, "65 rows");
    check::equal(odd_head.plan().attentions.size(), size_t{0}, "a head of 72");
    check::equal(other_cache.plan().attentions.size(), size_t{0}, "a cache of Q4_0");
    few_rows_rules rules = left.rules();
    rules.attends = [](const few_rows_attention_kernel &) { return false; };
    check::equal(plan_few_rows(left.layout(), rules).attentions.size(), size_t{0}, "left");
}

const check::tests plan_tests = {
    {"one input is converted and multiplied once", one_input_is_converted_and_multiplied_once},
    {"a third type or a fourth matrix takes another launch",
     a_third_type_or_a_fourth_matrix_takes_another_launch},
    {"floats of 16 bits are multiplied", floats_of_16_bits_are_multiplied},
    {"what is not ours stays with ggml", what_is_not_ours_stays_with_ggml},
    {"gate and up are fused with their activation", gate_and_up_are_fused_with_their_activation},
    {"halves of one matrix are gate and up", halves_of_one_matrix_are_gate_and_up},
    {"what others see is not fused away", what_others_see_is_not_fused_away},
    {"bias and residual are fused", bias_and_residual_are_fused},
    {"a shared expert is gated and added where it is multiplied",
     a_shared_expert_is_gated_and_added_where_it_is_multiplied},
    {"a residual that comes later or lies askew is not fused",
     a_residual_that_comes_later_or_lies_askew_is_not_fused},
    {"an input is converted again once it changed", an_input_is_converted_again_once_it_changed},
    {"the norm before a product is fused with the conversion",
     the_norm_before_a_product_is_fused_with_the_conversion},
    {"nothing moves over what is in use", nothing_moves_over_what_is_in_use},
    {"products of one input are put side by side", products_of_one_input_are_put_side_by_side},
    {"the order of a graph that is built again is known",
     the_order_of_a_graph_that_is_built_again_is_known},
    {"an order is known by sources behind one that is left out",
     an_order_is_known_by_sources_behind_one_that_is_left_out},
    {"parts depend on shapes alone", parts_depend_on_shapes_alone},
    {"kernels that do not fit give way to smaller ones",
     kernels_that_do_not_fit_give_way_to_smaller_ones},
    {"gate and up of experts are fused with their activation",
     gate_and_up_of_experts_are_fused_with_their_activation},
    {"a product with experts takes its bias along", a_product_with_experts_takes_its_bias_along},
    {"graphs of equal content are equal", graphs_of_equal_content_are_equal},
    {"ggml is laid out as expected", ggml_is_laid_out_as_expected},
    {"attention makes the input of the product behind it",
     attention_makes_the_input_of_the_product_behind_it},
    {"an input that is changed behind attention is converted anew",
     an_input_that_is_changed_behind_attention_is_converted_anew},
    {"attention of other kinds is left to ggml", attention_of_other_kinds_is_left_to_ggml},
};

}  // namespace
