#include "few_rows_plan.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "few_rows_attention.h"
#include "few_rows_experts.h"
#include "few_rows_groups.h"

namespace dflash {

namespace {

// The memory of a tensor.
struct range {
    uintptr_t begin = 0, end = 0;
    explicit range(const ggml_tensor & t)
        : begin(reinterpret_cast<uintptr_t>(t.data)), end(begin + ggml_nbytes(&t)) {}
    bool overlaps(const range & o) const { return begin < o.end && o.begin < end; }
};

size_t floats(size_t bytes) { return bytes / sizeof(float); }

// Where the products of a graph go: before which node each is launched, with what of the nodes
// after it, and what is left to ggml.
class planner {
  public:
    planner(const private_abi::graph & g, const few_rows_rules & rules)
        : g_(g, rules), rules_(rules), is_fused_(g.n_nodes, false) {}

    few_rows_plan run() {
        for (const few_rows_group & made : g_.groups()) {
            place(made);
        }
        join_experts();
        emit();
        return std::move(plan_);
    }

  private:
    // Whether `result`, which is written at node `last`, may be written before node `at`, and what
    // it is made of, `sources`, is there by then. `own` are the nodes whose work the launch does.
    bool may_move(const ggml_tensor & result, int last, int at,
                  const std::vector<const ggml_tensor *> & sources,
                  const std::vector<int> & own) const {
        const range out(result);
        for (int i = at; i < last; i++) {
            const ggml_tensor & t = g_[i];
            if (is_idle(t) || std::find(own.begin(), own.end(), i) != own.end()) {
                continue;
            }
            const range written(t);
            if (written.overlaps(out)) {
                return false;
            }
            for (const ggml_tensor * source : sources) {
                if (source != nullptr && written.overlaps(range(*source))) {
                    return false;
                }
            }
            for (const ggml_tensor * read : t.src) {
                if (read != nullptr && range(*read).overlaps(out)) {
                    return false;
                }
            }
        }
        return true;
    }

    // Whether a result may be written while others read this: it lies elsewhere, or is the same
    // element for element.
    static bool is_apart(const ggml_tensor & result, const ggml_tensor * residual) {
        if (residual == nullptr || !range(result).overlaps(range(*residual))) {
            return true;
        }
        return result.data == residual->data &&
               (result.nb[1] == residual->nb[1] || result.ne[1] == 1);
    }

    bool fits(const few_rows_chain & c, int at, const std::vector<few_rows_chain> & others) const {
        const ggml_tensor & result = g_[c.last];
        const range out(result);
        std::vector<const ggml_tensor *> sources = c.reads();
        sources.push_back(g_[c.node].src[1]);
        sources.push_back(c.bias);
        if (!std::all_of(c.residuals.begin(), c.residuals.end(),
                         [&](const ggml_tensor * r) { return is_apart(result, r); }) ||
            (c.gate != nullptr && out.overlaps(range(*c.gate))) ||
            !may_move(result, c.last, at, sources, g_.nodes_of(c))) {
            return false;
        }
        const auto overlaps = [](const std::vector<const ggml_tensor *> & read, const range & of) {
            return std::any_of(read.begin(), read.end(),
                               [&](const ggml_tensor * t) { return range(*t).overlaps(of); });
        };
        return std::none_of(others.begin(), others.end(), [&](const few_rows_chain & o) {
            const range of_other(g_[o.last]);
            return out.overlaps(of_other) || overlaps(o.reads(), out) ||
                   overlaps(c.reads(), of_other);
        });
    }

    void place(const few_rows_group & made) {
        if (made.activation_node >= 0) {
            place_activated(made);
            return;
        }
        std::vector<few_rows_chain> left = made.chains;
        while (!left.empty()) {
            const int at = left[0].node;
            std::vector<few_rows_chain> together, later;
            for (few_rows_chain c : left) {
                while (!fits(c, at, together) && c.last != c.node) {
                    g_.shorten(c);
                }
                const bool must_wait = c.node != at && !fits(c, at, together);
                (must_wait ? later : together).push_back(c);
            }
            add_launch(at, together, nullptr, made.units_per_part);
            left = std::move(later);
        }
    }

    void place_activated(const few_rows_group & made) {
        const few_rows_chain & gate = made.chains[0];
        const few_rows_chain & up = made.chains[1];
        const int at = std::min(gate.node, up.node);
        const ggml_tensor & result = g_[made.activation_node];
        std::vector<int> own = g_.nodes_of(gate);
        for (const int node : g_.nodes_of(up)) {
            own.push_back(node);
        }
        if (may_move(result, made.activation_node, at, {g_[gate.node].src[1], gate.bias, up.bias},
                     own)) {
            add_launch(at, made.chains, &result, made.units_per_part);
            return;
        }
        few_rows_group apart = made;
        apart.activation_node = -1;
        if (up.node == gate.node) {
            apart.chains = std::vector<few_rows_chain>(1, g_.chain_of(gate.node));
        } else if (up.node < gate.node) {
            std::swap(apart.chains[0], apart.chains[1]);
        }
        place(apart);
    }

    void add_launch(int at, const std::vector<few_rows_chain> & chains,
                    const ggml_tensor * activation, int units_per_part) {
        few_rows_plan::launch l;
        const ggml_tensor & x = *g_[chains[0].node].src[1];
        few_rows::product & p = l.product;
        p.n_columns = static_cast<int>(x.ne[1]);
        p.k = static_cast<int>(x.ne[0]);
        p.units_per_part = units_per_part;
        p.n_matrices = static_cast<int>(chains.size());
        g_.operands(chains, l.kernel);
        for (size_t i = 0; i < chains.size(); i++) {
            const few_rows_chain & c = chains[i];
            const ggml_tensor & w = *g_[c.node].src[0];
            const ggml_tensor & out = activation != nullptr ? *activation : g_[c.last];
            few_rows::matrix & m = p.matrices[i];
            m.weights = static_cast<const unsigned char *>(w.data) + c.first_row * w.nb[1];
            m.row_bytes = w.nb[1];
            m.out = static_cast<float *>(out.data);
            m.out_stride = floats(out.nb[1]);
            m.bias = c.bias != nullptr ? static_cast<const float *>(c.bias->data) + c.first_row
                                       : nullptr;
            m.gate = c.gate != nullptr ? static_cast<const float *>(c.gate->data) : nullptr;
            for (size_t r = 0; r < c.residuals.size(); r++) {
                m.residuals[r] = static_cast<const float *>(c.residuals[r]->data);
                m.residual_strides[r] = floats(c.residuals[r]->nb[1]);
            }
            m.rows = static_cast<int>(c.n_rows);
            m.type = g_.operand(c.node) == l.kernel.a ? 0 : 1;
            l.row_blocks +=
                activation != nullptr && i == 1
                    ? 0
                    : blocks_of(c.n_rows, activation != nullptr ? few_rows::BLOCK_ROWS / 2
                                                                : few_rows::BLOCK_ROWS);
            for (const int node : g_.nodes_of(c)) {
                if (!is_fused_[node]) {
                    l.nodes.push_back(&g_[node]);
                    is_fused_[node] = true;
                }
            }
        }
        if (activation != nullptr) {
            p.activation = activation_of(*activation);
            std::memcpy(&p.alpha, activation->op_params + 2, sizeof(float));
            std::memcpy(&p.limit, activation->op_params + 3, sizeof(float));
            l.nodes.push_back(activation);
            is_fused_[g_.index_of(activation)] = true;
        }

        int n_tiles = 1;
        while (n_tiles * few_rows::TILE_COLUMNS < p.n_columns) {
            n_tiles *= 2;
        }
        // Fewer tiles a block give the same bits, from more blocks.
        l.kernel.tiles = std::min(n_tiles, 4);
        while (l.kernel.tiles > 1 && !rules_.has(l.kernel)) {
            l.kernel.tiles /= 2;
        }
        const int units = blocks_of(p.k, few_rows::UNIT);
        l.parts = (units + units_per_part - 1) / units_per_part;
        l.layers = n_tiles / l.kernel.tiles;
        few_rows::conversion & c = l.input.input;
        c.x = static_cast<const float *>(x.data);
        c.stride = floats(x.nb[1]);
        c.k = p.k;
        c.n_columns = p.n_columns;
        c.n_tiles = n_tiles;
        const auto converted = static_cast<size_t>(units) * n_tiles * few_rows::TILE_BYTES;
        plan_.converted_bytes = std::max(plan_.converted_bytes, converted);
        const auto partials =
            static_cast<size_t>(few_rows::product_scratch(l.row_blocks, l.parts, n_tiles));
        plan_.partial_floats = std::max(plan_.partial_floats, partials);
        plan_.n_counters = std::max(plan_.n_counters, static_cast<size_t>(l.row_blocks) * l.layers);
        launches_at_[at].push_back(static_cast<int>(plan_.launches.size()));
        plan_.launches.push_back(std::move(l));
    }

    // Takes the RMS norm and its weights that give a launch its input from the end of `rest`, if
    // they are there, after node `begin`.
    bool absorb_norm(few_rows_plan::launch & l, const ggml_tensor & x, int begin) {
        const auto last = [&](int end) {
            while (end > begin && is_idle(*plan_.rest[end - 1])) {
                end--;
            }
            return end - 1;
        };
        const int scaled = last(static_cast<int>(plan_.rest.size()));
        const int normed = last(scaled);
        if (normed < begin || plan_.rest[scaled] != &x || x.op != GGML_OP_MUL) {
            return false;
        }
        const ggml_tensor & norm = *plan_.rest[normed];
        const ggml_tensor & weight = *x.src[1];
        const ggml_tensor * from = norm.src[0];
        if (norm.op != GGML_OP_RMS_NORM || x.src[0] != &norm || !is_computed(norm) ||
            !is_computed(x) || g_.only_user(g_.index_of(&norm)) != g_.index_of(&x) ||
            !is_float_matrix(*from) || !is_aligned(from->data, from->nb[1], 16) ||
            !is_aligned(x.data, x.nb[1], 16) || !is_apart(x, from) ||
            weight.type != GGML_TYPE_F32 || weight.ne[0] != x.ne[0] ||
            ggml_nelements(&weight) != x.ne[0] || weight.nb[0] != sizeof(float) ||
            !is_aligned(weight.data, 0, 16)) {
            return false;
        }
        few_rows::normalization & n = l.input;
        n.normal = static_cast<float *>(x.data);
        n.normal_stride = n.input.stride;
        n.input.x = static_cast<const float *>(from->data);
        n.input.stride = floats(from->nb[1]);
        n.weight = static_cast<const float *>(weight.data);
        std::memcpy(&n.epsilon, norm.op_params, sizeof(float));
        l.normalizes = true;
        l.nodes.push_back(&x);
        l.nodes.push_back(&norm);
        plan_.rest.erase(plan_.rest.begin() + scaled);
        plan_.rest.erase(plan_.rest.begin() + normed);
        return true;
    }

    // Lets the attention that ends right before a launch make the launch's input, if it is its
    // result.
    bool convert_in_attention(const few_rows_plan::launch & l) {
        if (l.normalizes || plan_.steps.empty() ||
            plan_.steps.back().kind != few_rows_plan::step::ATTENTION) {
            return false;
        }
        few_rows_plan::attention & before = plan_.attentions[plan_.steps.back().index];
        const few_rows::conversion & c = l.input.input;
        const few_rows::attention & a = before.arguments;
        if (c.x != a.out || c.k != a.n_heads * a.head_dim ||
            c.n_columns != a.n_streams * a.n_rows ||
            (c.n_columns > 1 && c.stride != static_cast<unsigned>(c.k))) {
            return false;
        }
        before.converts = true;
        before.arguments.n_tiles = c.n_tiles;
        return true;
    }

    // Whether a product of floats may share the launch right before it.
    bool joins_plain(const ggml_tensor & t) const {
        if (plan_.steps.empty() || plan_.steps.back().kind != few_rows_plan::step::PLAIN) {
            return false;
        }
        const std::vector<const ggml_tensor *> & nodes = plan_.plains.back().nodes;
        const ggml_tensor & before = *nodes[0];
        return nodes.size() == 1 && before.src[1] == t.src[1] &&
               !range(before).overlaps(range(*t.src[1])) && !range(before).overlaps(range(t));
    }

    // What node `user` takes of experts, with their bias, if it has one.
    expert_chain chain_behind(const ggml_tensor * source, int user) const {
        const int last = g_.find(source);
        if (last < 0 || g_.only_user(last) != user) {
            return {};
        }
        if (source->op != GGML_OP_ADD_ID) {
            return {source->op == GGML_OP_MUL_MAT_ID ? source : nullptr, nullptr};
        }
        const expert_chain c = chain_behind(source->src[0], last);
        return c.product != nullptr && c.bias == nullptr ? expert_chain{c.product, source}
                                                         : expert_chain{};
    }

    // Gate and `up` of experts are multiplied where their activation stands, and a product where
    // its bias is added.
    void join_experts() {
        for (int i = 0; i < g_.size(); i++) {
            const ggml_tensor & t = g_[i];
            if (activation_of(t) == few_rows::NONE || t.src[1] == nullptr) {
                continue;
            }
            const expert_chain gate = chain_behind(t.src[0], i), up = chain_behind(t.src[1], i);
            if (gate.product != nullptr && up.product != nullptr &&
                may_share(gate, up, t, rules_)) {
                join(plan_experts(gate, up, t, rules_), i);
            }
        }
        for (int i = 0; i < g_.size(); i++) {
            const ggml_tensor & t = g_[i];
            if (t.op == GGML_OP_ADD_ID && !is_fused_[i]) {
                const expert_chain c = {chain_behind(t.src[0], i).product, &t};
                if (c.product != nullptr && c.product == t.src[0] && takes_bias(c, rules_)) {
                    join(plan_experts(c, rules_), i);
                }
            }
        }
    }

    // Launches what is planned at node `at`, if what it is made of is still there.
    void join(const few_rows_plan::experts & made, int at) {
        std::vector<int> own;
        for (const ggml_tensor * node : made.before) {
            own.push_back(g_.index_of(node));
        }
        const ggml_tensor & product = *made.before[0];
        const range x(*product.src[1]), ids(*product.src[2]);
        for (int i = *std::min_element(own.begin(), own.end()); i < at; i++) {
            const ggml_tensor & other = g_[i];
            if (is_idle(other) || std::find(own.begin(), own.end(), i) != own.end()) {
                continue;
            }
            const range written(other);
            if (written.overlaps(x) || written.overlaps(ids)) {
                return;
            }
        }
        for (const int node : own) {
            is_fused_[node] = true;
        }
        joined_experts_[at] = made;
    }

    void reserve(const few_rows_plan::experts & made) {
        const size_t tile = few_rows::TILE_BYTES;
        const int units = blocks_of(made.input.k, few_rows::UNIT);
        plan_.converted_bytes = std::max(plan_.converted_bytes, tile * units * made.input.n_tiles);
        plan_.partial_floats =
            std::max(plan_.partial_floats, static_cast<size_t>(few_rows::product_scratch(
                                               made.row_blocks * made.items, made.parts, 1)));
        plan_.n_counters =
            std::max(plan_.n_counters, static_cast<size_t>(made.row_blocks) * made.items);
        plan_.n_items = std::max(plan_.n_items, static_cast<size_t>(made.items));
    }

    void emit() {
        int begin = 0;
        bool works = false;  // whether the nodes since `begin` do anything
        const auto flush = [&] {
            const int end = static_cast<int>(plan_.rest.size());
            if (works) {
                plan_.steps.push_back(
                    {few_rows_plan::step::SEGMENT, static_cast<int>(plan_.segments.size())});
                plan_.segments.push_back({begin, end});
            }
            begin = end;
            works = false;
        };
        const ggml_tensor * converted = nullptr;  // the input that lies there converted
        const ggml_tensor * chosen = nullptr;     // the choice of experts that lies there in order
        const auto write = [&](const ggml_tensor & t) {
            if (converted != nullptr && range(t).overlaps(range(*converted))) {
                converted = nullptr;
            }
        };
        for (int i = 0; i < g_.size(); i++) {
            const auto here = launches_at_.find(i);
            if (here != launches_at_.end()) {
                for (const int index : here->second) {
                    few_rows_plan::launch & l = plan_.launches[index];
                    const ggml_tensor * x = l.nodes[0]->src[1];
                    l.converts = converted != x;
                    const size_t n_nodes = l.nodes.size();
                    if (l.converts && absorb_norm(l, *x, begin)) {
                        works = std::any_of(plan_.rest.begin() + begin, plan_.rest.end(),
                                            [](const ggml_tensor * t) { return !is_idle(*t); });
                    }
                    flush();
                    if (l.converts && convert_in_attention(l)) {
                        l.converts = false;
                    }
                    converted = x;
                    plan_.steps.push_back({few_rows_plan::step::LAUNCH, index});
                    for (size_t n = 0; n < n_nodes; n++) {  // what is written after the conversion
                        write(*l.nodes[n]);
                    }
                }
            }
            if (is_fused_[i]) {
                continue;
            }
            ggml_tensor & t = g_[i];
            if (takes_attention(t, rules_)) {
                flush();
                size_t scratch = 0;
                plan_.steps.push_back(
                    {few_rows_plan::step::ATTENTION, static_cast<int>(plan_.attentions.size())});
                plan_.attentions.push_back(plan_attention(t, rules_, scratch));
                plan_.partial_floats = std::max(plan_.partial_floats, scratch);
                write(t);
                continue;
            }
            if (takes_plain(t, rules_)) {
                if (works || !joins_plain(t)) {
                    flush();
                    plan_.steps.push_back(
                        {few_rows_plan::step::PLAIN, static_cast<int>(plan_.plains.size())});
                    plan_.plains.emplace_back();
                }
                add_plain(plan_.plains.back(), t);
                write(t);
                continue;
            }
            const auto joined = joined_experts_.find(i);
            if (joined != joined_experts_.end() || takes_experts(t, rules_)) {
                flush();
                few_rows_plan::experts made =
                    joined != joined_experts_.end() ? joined->second : plan_experts(t, rules_);
                const ggml_tensor & product = made.before.empty() ? t : *made.before[0];
                made.converts = converted != product.src[1];
                made.orders = chosen != product.src[2];
                converted = product.src[1];
                chosen = product.src[2];
                reserve(made);
                plan_.steps.push_back(
                    {few_rows_plan::step::EXPERTS, static_cast<int>(plan_.of_experts.size())});
                plan_.of_experts.push_back(made);
                write(t);
                continue;
            }
            plan_.rest.push_back(&t);
            if (!is_idle(t)) {
                works = true;
                write(t);
            }
        }
        flush();
    }

    few_rows_graph g_;
    const few_rows_rules & rules_;
    few_rows_plan plan_;
    std::vector<bool> is_fused_;  // nodes whose work launches do
    std::unordered_map<int, std::vector<int>> launches_at_;
    std::unordered_map<int, few_rows_plan::experts> joined_experts_;
};

}  // namespace

few_rows_plan plan_few_rows(const private_abi::graph & graph, const few_rows_rules & rules) {
    return planner(graph, rules).run();
}

}  // namespace dflash
