#include "few_rows_groups.h"

#include <algorithm>

#include "few_rows_experts.h"

namespace dflash {

namespace {

// Nodes further apart are not put into one launch: all nodes between are looked through.
constexpr int most_apart = 256;

}  // namespace

bool is_idle(const ggml_tensor & t) {
    return t.op == GGML_OP_NONE || t.op == GGML_OP_VIEW || t.op == GGML_OP_RESHAPE ||
           t.op == GGML_OP_PERMUTE || t.op == GGML_OP_TRANSPOSE || ggml_is_empty(&t);
}

bool is_float_matrix(const ggml_tensor & t) {
    return t.type == GGML_TYPE_F32 && t.nb[0] == sizeof(float) && is_matrix(t) &&
           is_aligned(t.data, t.nb[1], sizeof(float));
}

few_rows::activation activation_of(const ggml_tensor & t) {
    if (t.op != GGML_OP_GLU) {
        return few_rows::NONE;
    }
    switch (ggml_get_glu_op(&t)) {
        case GGML_GLU_OP_SWIGLU: return few_rows::SWIGLU;
        case GGML_GLU_OP_GEGLU: return few_rows::GEGLU;
        case GGML_GLU_OP_SWIGLU_OAI: return few_rows::SWIGLU_OAI;
        default: return few_rows::NONE;
    }
}

few_rows_graph::few_rows_graph(const private_abi::graph & g, const few_rows_rules & rules,
                               bool any_shape)
    : g_(g), rules_(rules), any_shape_(any_shape), state_(g.n_nodes) {
    for (int i = 0; i < size(); i++) {
        state_[i] = is_ours(*g_.nodes[i]) ? state::candidate : state::of_ggml;
        is_any_ours_ = is_any_ours_ || state_[i] == state::candidate;
    }
    if (is_any_ours_) {
        find_users();
    }
}

bool few_rows_graph::is_ours(const ggml_tensor & t) const {
    if (t.op != GGML_OP_MUL_MAT || t.op_params[1] != 0) {
        return false;
    }
    const ggml_tensor & w = *t.src[0];
    const ggml_tensor & x = *t.src[1];
    if (!is_readable(w, rules_)) {
        return false;
    }
    if (any_shape_) {
        return x.type == GGML_TYPE_F32 && t.type == GGML_TYPE_F32;
    }
    if (!is_computed(t) || !is_float_matrix(x) || !is_float_matrix(t) || x.ne[1] < 1 ||
        x.ne[1] > few_rows::MAX_COLUMNS || !is_aligned(x.data, x.ne[1] > 1 ? x.nb[1] : 0, 16)) {
        return false;
    }
    return rules_.is_faster(w.type, w.ne[0], w.ne[1], x.ne[1]);
}

void few_rows_graph::find_users() {
    for (int i = 0; i < size(); i++) {
        index_[g_.nodes[i]] = i;
    }
    user_.assign(size(), -1);
    n_users_.assign(size(), 0);
    for (int i = 0; i < size(); i++) {
        const ggml_tensor & t = *g_.nodes[i];
        for (const ggml_tensor * source : t.src) {
            use(source, i);
        }
        if (t.view_src != nullptr && t.view_src != t.src[0]) {
            use(t.view_src, i);
        }
    }
}

void few_rows_graph::use(const ggml_tensor * source, int by) {
    const auto found = source == nullptr ? index_.end() : index_.find(source);
    if (found != index_.end()) {
        user_[found->second] = by;
        n_users_[found->second]++;
    }
}

bool few_rows_graph::is_result(const ggml_tensor & t) const {
    return any_shape_ ? t.type == GGML_TYPE_F32 : is_computed(t) && is_float_matrix(t);
}

bool few_rows_graph::is_sum_of(int node, const ggml_tensor & part) const {
    const ggml_tensor & t = *g_.nodes[node];
    return t.op == GGML_OP_ADD && is_result(t) && ggml_are_same_shape(&t, &part);
}

// The bias is a weight, so that it is none of the sums of two results, which look the same for
// one column.
void few_rows_graph::add_bias(few_rows_chain & c) const {
    const ggml_tensor & t = *g_.nodes[c.last];
    const int user = only_user(c.last);
    if (user < 0 || !is_sum_of(user, t) || g_.nodes[user]->src[0] != &t) {
        return;
    }
    const ggml_tensor & bias = *g_.nodes[user]->src[1];
    if (bias.type == GGML_TYPE_F32 && bias.op == GGML_OP_NONE && bias.view_src == nullptr &&
        bias.ne[0] == t.ne[0] && ggml_nelements(&bias) == t.ne[0] && bias.nb[0] == 4 &&
        rules_.reads(bias)) {
        c.bias = &bias;
        c.last = user;
    }
}

// A shared expert's: one number for each column, which must be there before the product.
void few_rows_graph::add_gate(few_rows_chain & c) const {
    const ggml_tensor & t = *g_.nodes[c.last];
    const int user = only_user(c.last);
    if (user < 0 || g_.nodes[user]->op != GGML_OP_MUL || g_.nodes[user]->src[0] != &t ||
        !is_result(*g_.nodes[user])) {
        return;
    }
    const ggml_tensor & s = *g_.nodes[user]->src[1];
    const int sigmoid = find(&s);
    if (sigmoid < 0 || s.op != GGML_OP_UNARY || ggml_get_unary_op(&s) != GGML_UNARY_OP_SIGMOID ||
        only_user(sigmoid) != user || s.ne[0] != 1 || s.ne[1] != t.ne[1] || !is_result(s) ||
        !is_float_matrix(*s.src[0]) || !ggml_is_contiguous(s.src[0]) || find(s.src[0]) < 0 ||
        find(s.src[0]) > c.node) {
        return;
    }
    c.sigmoid = sigmoid;
    c.gate = s.src[0];
    c.last = user;
}

void few_rows_graph::add_residual(few_rows_chain & c) const {
    const ggml_tensor & t = *g_.nodes[c.last];
    const int user = only_user(c.last);
    if (user < 0 || !is_sum_of(user, t)) {
        return;
    }
    const ggml_tensor & sum = *g_.nodes[user];
    const ggml_tensor * other = sum.src[0] == &t ? sum.src[1] : sum.src[0];
    if (other != &t && is_float_matrix(*other) && ggml_are_same_shape(other, &t)) {
        c.residuals.push_back(other);
        c.last = user;
    }
}

void few_rows_graph::shorten(few_rows_chain & c) const {
    const ggml_tensor & t = *g_.nodes[c.last];
    const bool is_second = !c.residuals.empty() && t.src[0] == c.residuals.back();
    c.last = index_.at(t.src[is_second ? 1 : 0]);
    if (!c.residuals.empty()) {
        c.residuals.pop_back();
    } else if (c.gate != nullptr) {
        c.gate = nullptr;
        c.sigmoid = -1;
    } else {
        c.bias = nullptr;
    }
}

// The product whose result, with its bias, is this source of an activation; -1: none.
int few_rows_graph::product_behind(const ggml_tensor * source, int activation) const {
    const auto found = index_.find(source);
    if (found == index_.end() || only_user(found->second) != activation) {
        return -1;
    }
    int node = found->second;
    if (g_.nodes[node]->op == GGML_OP_ADD) {
        const auto product = index_.find(g_.nodes[node]->src[0]);
        node = product == index_.end() ? -1 : product->second;
    }
    if (node < 0 || state_[node] != state::candidate || chain_of(node).last != found->second) {
        return -1;
    }
    return node;
}

bool few_rows_graph::has_kernel(const std::vector<few_rows_chain> & chains) const {
    few_rows_kernel kernel{};
    kernel.tiles = 1;
    return operands(chains, kernel) && rules_.has(kernel);
}

// The only node that reads this one's result, if nobody else can see it.
int few_rows_graph::only_user(int node) const {
    const ggml_tensor & t = *g_.nodes[node];
    const int user = user_[node];
    const bool is_one = n_users_[node] == 1 && private_abi::n_uses(g_, &t) == 1 &&
                        t.view_src == nullptr && user > node;
    const bool is_seen = (t.flags & GGML_TENSOR_FLAG_OUTPUT) != 0;
    return is_one && (any_shape_ || (!is_seen && is_computed(*g_.nodes[user]))) ? user : -1;
}

few_rows_chain few_rows_graph::chain_of(int node) const {
    few_rows_chain c;
    c.node = c.last = node;
    c.n_rows = g_.nodes[node]->src[0]->ne[1];
    add_bias(c);
    return c;
}

std::vector<int> few_rows_graph::nodes_of(const few_rows_chain & c) const {
    std::vector<int> nodes;
    for (int i = c.node; i != c.last; i = user_[i]) {
        nodes.push_back(i);
    }
    nodes.push_back(c.last);
    if (c.sigmoid >= 0) {
        nodes.push_back(c.sigmoid);
    }
    return nodes;
}

// The block types of a launch; false if there are more than two.
bool few_rows_graph::operands(const std::vector<few_rows_chain> & chains,
                              few_rows_kernel & kernel) const {
    kernel.a = kernel.b = operand(chains[0].node);
    for (const few_rows_chain & c : chains) {
        const auto o = operand(c.node);
        if (o == kernel.a || o == kernel.b) {
            continue;
        }
        if (!(kernel.a == kernel.b)) {
            return false;
        }
        kernel.b = o;
    }
    if (kernel.b < kernel.a) {
        std::swap(kernel.a, kernel.b);
    }
    return true;
}

few_rows_kernel::operand few_rows_graph::operand(int node) const {
    return operand_of(*g_.nodes[node]->src[0]);
}

// Gate and up of an activation share a launch with it.
void few_rows_graph::group_activations(std::vector<few_rows_group> & found) {
    for (int i = 0; i < size(); i++) {
        const ggml_tensor & t = *g_.nodes[i];
        if (activation_of(t) == few_rows::NONE || !is_result(t)) {
            continue;
        }
        const bool is_split = t.src[1] != nullptr;
        const int gate = product_behind(t.src[0], i);
        const int up = is_split ? product_behind(t.src[1], i) : gate;
        if (gate < 0 || up < 0 || (gate == up) == is_split ||
            g_.nodes[gate]->src[1] != g_.nodes[up]->src[1] ||
            !ggml_are_same_shape(g_.nodes[gate], g_.nodes[up]) ||
            i - std::min(gate, up) > most_apart) {
            continue;
        }
        few_rows_group made;
        made.chains.push_back(chain_of(gate));
        made.chains.push_back(chain_of(up));
        made.activation_node = i;
        if (!is_split) {  // halves of one matrix
            const bool is_swapped = t.op_params[1] != 0;
            for (few_rows_chain & c : made.chains) {
                c.n_rows /= 2;
            }
            made.chains[is_swapped ? 0 : 1].first_row = made.chains[0].n_rows;
        }
        if (has_kernel(made.chains)) {
            state_[gate] = state_[up] = state::grouped;
            found.push_back(std::move(made));
        }
    }
}

// Products of one input share a launch.
void few_rows_graph::group_products(std::vector<few_rows_group> & found) {
    for (int i = 0; i < size(); i++) {
        if (state_[i] != state::candidate) {
            continue;
        }
        few_rows_group made;
        made.chains.push_back(chain_of(i));
        if (!has_kernel(made.chains)) {
            state_[i] = state::of_ggml;
            continue;
        }
        state_[i] = state::grouped;
        for (int j = i + 1;
             j < size() && j <= i + most_apart && made.chains.size() < few_rows::MAX_MATRICES;
             j++) {
            if (state_[j] == state::candidate && g_.nodes[j]->src[1] == g_.nodes[i]->src[1]) {
                made.chains.push_back(chain_of(j));
                if (has_kernel(made.chains)) {
                    state_[j] = state::grouped;
                } else {
                    made.chains.pop_back();
                }
            }
        }
        for (few_rows_chain & c : made.chains) {
            add_gate(c);
            add_residual(c);
            add_residual(c);
        }
        found.push_back(std::move(made));
    }
}

std::vector<few_rows_group> few_rows_graph::groups() {
    std::vector<few_rows_group> found;
    if (!is_any_ours_) {
        return found;
    }
    group_activations(found);
    group_products(found);
    for (few_rows_group & made : found) {
        int row_blocks = 0;
        for (const few_rows_chain & c : made.chains) {
            row_blocks += blocks_of(c.n_rows, few_rows::BLOCK_ROWS);
        }
        const int k = static_cast<int>(g_.nodes[made.chains[0].node]->src[0]->ne[0]);
        made.units_per_part =
            few_rows_units_per_part(row_blocks, blocks_of(k, few_rows::UNIT), rules_.n_processors);
    }
    return found;
}

namespace {

const ggml_tensor * root(const ggml_tensor * t) { return t->view_src != nullptr ? t->view_src : t; }

// What of a group is moved behind the first of its products, with that. Products have no
// sources but weights and the input that they share.
bool gather(const few_rows_graph & graph, const few_rows_group & made,
            std::vector<std::vector<int>> & before, std::vector<bool> & moves) {
    std::vector<int> nodes;
    for (const few_rows_chain & c : made.chains) {
        nodes.push_back(c.node);
        if (c.bias != nullptr) {
            nodes.push_back(graph.only_user(c.node));
        }
    }
    if (made.activation_node >= 0) {
        nodes.push_back(made.activation_node);
    }
    std::sort(nodes.begin(), nodes.end());
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
    const int first = nodes.front(), last = nodes.back();
    if (last - first + 1 == static_cast<int>(nodes.size())) {
        return false;  // they are side by side
    }
    const ggml_tensor * x = graph[first].src[1];
    for (int i = first; i < last; i++) {
        const ggml_tensor & t = graph[i];
        if (!is_idle(t) && t.view_src != nullptr && t.view_src == root(x)) {
            return false;  // the input changes
        }
    }
    for (const int node : nodes) {
        before[first].push_back(node);
        moves[node] = true;
    }
    return true;
}

// On a CPU, routers are other operations by now (router_products.h).
bool is_router(const ggml_tensor & t, const few_rows_rules & rules) {
    return (t.op == GGML_OP_MUL_MAT || t.op == GGML_OP_CUSTOM) && t.src[0] != nullptr &&
           t.src[1] != nullptr && t.src[2] == nullptr && is_readable_plain(*t.src[0], rules);
}

// The next product of floats with the input of this one, as a shared expert's gate has a router's:
// one launch, and the gate is there before the expert. -1: none.
int router_beside(const few_rows_graph & graph, int node, const few_rows_rules & rules) {
    const int end = std::min(graph.size(), node + most_apart);
    for (int i = is_router(graph[node], rules) ? node + 1 : end; i < end; i++) {
        if (graph[i].src[1] == graph[node].src[1] && is_router(graph[i], rules)) {
            return i;
        }
    }
    return -1;
}

// The nodes in their new order; empty if it is theirs.
std::vector<int> order_of(const private_abi::graph & g, const few_rows_rules & rules) {
    few_rows_graph graph(g, rules, /*any_shape=*/true);
    const int n = graph.size();
    std::vector<std::vector<int>> before(n);  // nodes that are moved before others
    std::vector<bool> moves(n, false);
    bool any = false;
    for (const few_rows_group & made : graph.groups()) {
        any = gather(graph, made, before, moves) || any;
    }
    for (int i = 0; i < n; i++) {
        const int other = moves[i] ? -1 : router_beside(graph, i, rules);
        if (other >= 0 && !moves[other]) {
            few_rows_group made;
            made.chains.resize(2);
            made.chains[0].node = i;
            made.chains[1].node = other;
            any = gather(graph, made, before, moves) || any;
        }
    }
    std::vector<int> order;
    for (int i = 0; any && i < n; i++) {
        order.insert(order.end(), before[i].begin(), before[i].end());
        if (!moves[i]) {
            order.push_back(i);
        }
    }
    return order;
}

void put_in_order(const private_abi::graph & g, const std::vector<int> & order) {
    const std::vector<ggml_tensor *> nodes(g.nodes, g.nodes + g.n_nodes);
    std::transform(order.begin(), order.end(), g.nodes, [&](int node) { return nodes[node]; });
}

// With experts in RAM a pass is two small graphs a layer.
constexpr size_t most_orders = 512;

}  // namespace

bool order_few_rows(const private_abi::graph & g, const few_rows_rules & rules) {
    const std::vector<int> order = order_of(g, rules);
    put_in_order(g, order);
    return !order.empty();
}

void known_orders::order(const private_abi::graph & g, const few_rows_rules & rules) {
    key_.clear();
    for (int i = 0; i < g.n_nodes; i++) {
        const ggml_tensor & t = *g.nodes[i];
        key_.push_back(reinterpret_cast<uintptr_t>(&t));
        key_.push_back(static_cast<uintptr_t>(t.op) << 16 | static_cast<uintptr_t>(t.type));
        key_.push_back(reinterpret_cast<uintptr_t>(t.view_src));
        for (const ggml_tensor * source : t.src) {  // also those behind one that is left out
            key_.push_back(reinterpret_cast<uintptr_t>(source));
        }
    }
    auto known = known_.find(key_);
    if (known == known_.end()) {
        if (known_.size() >= most_orders) {
            known_.clear();
        }
        known = known_.emplace(key_, order_of(g, rules)).first;
    }
    put_in_order(g, known->second);
}

}  // namespace dflash
