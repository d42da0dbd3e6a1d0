#include "few_rows_plan.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace dflash {

namespace {

using ggml_private::graph;

struct block_type {
    ggml_type type;
    const char * name;  // as in native/cuda/product.cuh
    int unit_bytes;
};

constexpr block_type block_types[] = {
    {GGML_TYPE_Q2_K, "Q2_K", 84},      {GGML_TYPE_Q3_K, "Q3_K", 110},
    {GGML_TYPE_Q4_K, "Q4_K", 144},     {GGML_TYPE_Q5_K, "Q5_K", 176},
    {GGML_TYPE_Q6_K, "Q6_K", 210},     {GGML_TYPE_Q8_0, "Q8_0", 272},
    {GGML_TYPE_Q4_0, "Q4_0", 144},     {GGML_TYPE_Q4_1, "Q4_1", 160},
    {GGML_TYPE_Q5_0, "Q5_0", 176},     {GGML_TYPE_Q5_1, "Q5_1", 192},
    {GGML_TYPE_IQ4_NL, "IQ4_NL", 144}, {GGML_TYPE_IQ4_XS, "IQ4_XS", 136},
    {GGML_TYPE_MXFP4, "MXFP4", 136},
};

// Nodes further apart are not put into one launch: all nodes between are looked through.
constexpr int most_apart = 256;

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
    return few_rows::weight_bytes(few_rows::row_pitch(find_type(o.type)->unit_bytes, o.aligned));
}

bool is_aligned(const void * at, size_t stride, size_t to) {
    return reinterpret_cast<uintptr_t>(at) % to == 0 && stride % to == 0;
}

// Whether all units of all rows of a matrix, of k elements, are whole and lie at multiples of 16
// bytes.
bool has_aligned_units(const block_type & type, const void * at, int64_t k, size_t row_bytes) {
    return k % few_rows::UNIT == 0 && type.unit_bytes % 16 == 0 && is_aligned(at, row_bytes, 16);
}

// The memory of a tensor.
struct range {
    uintptr_t begin = 0, end = 0;
    explicit range(const ggml_tensor & t)
        : begin(reinterpret_cast<uintptr_t>(t.data)), end(begin + ggml_nbytes(&t)) {}
    bool overlaps(const range & o) const { return begin < o.end && o.begin < end; }
};

// Nodes that only describe memory, or that ggml skips.
bool is_idle(const ggml_tensor & t) {
    return t.op == GGML_OP_NONE || t.op == GGML_OP_VIEW || t.op == GGML_OP_RESHAPE ||
           t.op == GGML_OP_PERMUTE || t.op == GGML_OP_TRANSPOSE || ggml_is_empty(&t);
}

bool is_matrix(const ggml_tensor & t) { return t.ne[2] == 1 && t.ne[3] == 1; }

bool is_float_matrix(const ggml_tensor & t) {
    return t.type == GGML_TYPE_F32 && t.nb[0] == sizeof(float) && is_matrix(t) &&
           is_aligned(t.data, t.nb[1], sizeof(float));
}

bool is_computed(const ggml_tensor & t) { return (t.flags & GGML_TENSOR_FLAG_COMPUTE) != 0; }

// Whether there are kernels for a matrix, where it lies.
bool is_readable(const ggml_tensor & w, const few_rows_rules & rules) {
    return find_type(w.type) != nullptr && is_matrix(w) && ggml_is_contiguous(&w) &&
           w.ne[0] % 32 == 0 && w.op == GGML_OP_NONE && w.view_src == nullptr &&
           is_aligned(w.data, w.nb[1], 2) && rules.reads(w);
}

few_rows_kernel::operand operand_of(const ggml_tensor & w) {
    return {w.type, has_aligned_units(*find_type(w.type), w.data, w.ne[0], w.nb[1])};
}

size_t floats(size_t bytes) { return bytes / sizeof(float); }

int blocks_of(int64_t rows, int block_rows) {
    return static_cast<int>((rows + block_rows - 1) / block_rows);
}

// One product and what is done with its result at once.
struct chain {
    int node = 0;                       // of the product
    int last = 0;                       // the node whose result is written
    int64_t first_row = 0, n_rows = 0;  // of the matrix
    const ggml_tensor * bias = nullptr;
    const ggml_tensor * residual = nullptr;
};

// Products with one input that may share a launch. The units of a part are chosen for all of them,
// also where memory then forbids the one launch: else a column's bits would depend on where the
// columns beside it made ggml put things.
struct group {
    std::vector<chain> chains;  // with an activation: the gate, then the values
    int activation_node = -1;
    int units_per_part = 0;
};

class planner {
  public:
    // `any_shape`: all is decided by operations and weights alone, whatever the shapes of the rest.
    planner(const graph & g, const few_rows_rules & rules, bool any_shape = false)
        : g_(g), rules_(rules), any_shape_(any_shape) {}

    few_rows_plan run() {
        if (find_ours()) {
            for (const group & made : groups()) {
                place(made);
            }
        }
        emit();
        return std::move(plan_);
    }

    bool order() {
        if (!find_ours()) {
            return false;
        }
        std::vector<std::vector<int>> before(n_);  // nodes that are moved before others
        std::vector<bool> moves(n_, false);
        bool any = false;
        for (const group & made : groups()) {
            any = gather(made, before, moves) || any;
        }
        if (any) {
            std::vector<ggml_tensor *> ordered;
            for (int i = 0; i < n_; i++) {
                for (const int node : before[i]) {
                    ordered.push_back(g_.nodes[node]);
                }
                if (!moves[i]) {
                    ordered.push_back(g_.nodes[i]);
                }
            }
            std::copy(ordered.begin(), ordered.end(), g_.nodes);
        }
        return any;
    }

  private:
    enum class state : char { of_ggml, candidate, grouped, fused };

    bool find_ours() {
        n_ = g_.n_nodes;
        state_.resize(n_);
        bool any = false;
        for (int i = 0; i < n_; i++) {
            state_[i] = is_ours(*g_.nodes[i]) ? state::candidate : state::of_ggml;
            any = any || state_[i] == state::candidate;
        }
        if (any) {
            find_users();
        }
        return any;
    }

    // What of a group is moved behind the first of its products, with that. Products have no
    // sources but weights and the input that they share.
    bool gather(const group & made, std::vector<std::vector<int>> & before,
                std::vector<bool> & moves) const {
        std::vector<int> nodes;
        for (const chain & c : made.chains) {
            nodes.push_back(c.node);
            if (c.bias != nullptr) {
                nodes.push_back(user_[c.node]);
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
        const ggml_tensor * x = g_.nodes[first]->src[1];
        for (int i = first; i < last; i++) {
            const ggml_tensor & t = *g_.nodes[i];
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

    static const ggml_tensor * root(const ggml_tensor * t) {
        return t->view_src != nullptr ? t->view_src : t;
    }

    few_rows_kernel::operand operand(int node) const { return operand_of(*g_.nodes[node]->src[0]); }

    bool is_ours(const ggml_tensor & t) const {
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
        return rules_.is_faster(w.type, w.ne[0], w.ne[1]);
    }

    void find_users() {
        for (int i = 0; i < n_; i++) {
            index_[g_.nodes[i]] = i;
        }
        user_.assign(n_, -1);
        n_users_.assign(n_, 0);
        for (int i = 0; i < n_; i++) {
            const ggml_tensor & t = *g_.nodes[i];
            for (const ggml_tensor * source : t.src) {
                use(source, i);
            }
            if (t.view_src != nullptr && t.view_src != t.src[0]) {
                use(t.view_src, i);
            }
        }
    }

    void use(const ggml_tensor * source, int by) {
        const auto found = source == nullptr ? index_.end() : index_.find(source);
        if (found != index_.end()) {
            user_[found->second] = by;
            n_users_[found->second]++;
        }
    }

    // The only node that reads this one's result, if nobody else can see it.
    int only_user(int node) const {
        const ggml_tensor & t = *g_.nodes[node];
        const int user = user_[node];
        const bool is_one = n_users_[node] == 1 && ggml_private::n_uses(g_, &t) == 1 &&
                            t.view_src == nullptr && user > node;
        const bool is_seen = (t.flags & GGML_TENSOR_FLAG_OUTPUT) != 0;
        return is_one && (any_shape_ || (!is_seen && is_computed(*g_.nodes[user]))) ? user : -1;
    }

    bool is_result(const ggml_tensor & t) const {
        return any_shape_ ? t.type == GGML_TYPE_F32 : is_computed(t) && is_float_matrix(t);
    }

    bool is_sum_of(int node, const ggml_tensor & part) const {
        const ggml_tensor & t = *g_.nodes[node];
        return t.op == GGML_OP_ADD && is_result(t) && ggml_are_same_shape(&t, &part);
    }

    // The bias is a weight, so that it is none of the sums of two results, which look the same for
    // one column.
    void add_bias(chain & c) const {
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

    void add_residual(chain & c) const {
        const ggml_tensor & t = *g_.nodes[c.last];
        const int user = only_user(c.last);
        if (user < 0 || !is_sum_of(user, t)) {
            return;
        }
        const ggml_tensor & sum = *g_.nodes[user];
        const ggml_tensor * other = sum.src[0] == &t ? sum.src[1] : sum.src[0];
        if (other != &t && is_float_matrix(*other) && ggml_are_same_shape(other, &t)) {
            c.residual = other;
            c.last = user;
        }
    }

    chain chain_of(int node) const {
        chain c;
        c.node = c.last = node;
        c.n_rows = g_.nodes[node]->src[0]->ne[1];
        add_bias(c);
        return c;
    }

    static few_rows::activation activation_of(const ggml_tensor & t) {
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

    // The product whose result, with its bias, is this source of an activation; -1: none.
    int product_behind(const ggml_tensor * source, int activation) const {
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

    bool has_kernel(const std::vector<chain> & chains) const {
        few_rows_kernel kernel{};
        kernel.tiles = 1;
        return operands(chains, kernel) && rules_.has(kernel);
    }

    // The block types of a launch; false if there are more than two.
    bool operands(const std::vector<chain> & chains, few_rows_kernel & kernel) const {
        kernel.a = kernel.b = operand(chains[0].node);
        for (const chain & c : chains) {
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

    std::vector<group> groups() {
        std::vector<group> found;
        for (int i = 0; i < n_; i++) {
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
            group made;
            made.chains.push_back(chain_of(gate));
            made.chains.push_back(chain_of(up));
            made.activation_node = i;
            if (!is_split) {  // halves of one matrix
                const bool is_swapped = t.op_params[1] != 0;
                for (chain & c : made.chains) {
                    c.n_rows /= 2;
                }
                made.chains[is_swapped ? 0 : 1].first_row = made.chains[0].n_rows;
            }
            if (has_kernel(made.chains)) {
                state_[gate] = state_[up] = state::grouped;
                found.push_back(std::move(made));
            }
        }
        for (int i = 0; i < n_; i++) {
            if (state_[i] != state::candidate) {
                continue;
            }
            group made;
            made.chains.push_back(chain_of(i));
            if (!has_kernel(made.chains)) {
                state_[i] = state::of_ggml;
                continue;
            }
            state_[i] = state::grouped;
            for (int j = i + 1;
                 j < n_ && j <= i + most_apart && made.chains.size() < few_rows::MAX_MATRICES;
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
            for (chain & c : made.chains) {
                add_residual(c);
            }
            found.push_back(std::move(made));
        }
        for (group & made : found) {
            int row_blocks = 0;
            for (const chain & c : made.chains) {
                row_blocks += blocks_of(c.n_rows, few_rows::BLOCK_ROWS);
            }
            const int k = static_cast<int>(g_.nodes[made.chains[0].node]->src[0]->ne[0]);
            made.units_per_part = few_rows_units_per_part(row_blocks, blocks_of(k, few_rows::UNIT),
                                                          rules_.n_processors);
        }
        return found;
    }

    // Whether `result`, which is written at node `last`, may be written before node `at`, and what
    // it is made of, `sources`, is there by then. `own` are the nodes whose work the launch does.
    bool may_move(const ggml_tensor & result, int last, int at,
                  const std::vector<const ggml_tensor *> & sources,
                  const std::vector<int> & own) const {
        const range out(result);
        for (int i = at; i < last; i++) {
            const ggml_tensor & t = *g_.nodes[i];
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

    static std::vector<int> nodes_of(const chain & c, const std::vector<int> & users) {
        std::vector<int> nodes;
        for (int i = c.node; i != c.last; i = users[i]) {
            nodes.push_back(i);
        }
        nodes.push_back(c.last);
        return nodes;
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

    bool fits(const chain & c, int at, const std::vector<chain> & others) const {
        const ggml_tensor & result = *g_.nodes[c.last];
        const ggml_tensor * x = g_.nodes[c.node]->src[1];
        if (!is_apart(result, c.residual) ||
            !may_move(result, c.last, at, {x, c.bias, c.residual}, nodes_of(c, user_))) {
            return false;
        }
        return std::none_of(others.begin(), others.end(), [&](const chain & o) {
            const range out(result), of_other(*g_.nodes[o.last]);
            return out.overlaps(of_other) ||
                   (o.residual != nullptr && out.overlaps(range(*o.residual))) ||
                   (c.residual != nullptr && of_other.overlaps(range(*c.residual)));
        });
    }

    void place(const group & made) {
        if (made.activation_node >= 0) {
            place_activated(made);
            return;
        }
        std::vector<chain> left = made.chains;
        while (!left.empty()) {
            const int at = left[0].node;
            std::vector<chain> together, later;
            for (chain c : left) {
                if (!fits(c, at, together)) {
                    if (c.residual != nullptr) {
                        const ggml_tensor & sum = *g_.nodes[c.last];
                        c.last = index_.at(sum.src[0] == c.residual ? sum.src[1] : sum.src[0]);
                        c.residual = nullptr;
                    }
                    if (!fits(c, at, together) && c.bias != nullptr) {
                        c.last = c.node;
                        c.bias = nullptr;
                    }
                    if (!fits(c, at, together) && c.node != at) {
                        later.push_back(c);
                        continue;
                    }
                }
                together.push_back(c);
            }
            add_launch(at, together, nullptr, made.units_per_part);
            left = std::move(later);
        }
    }

    void place_activated(const group & made) {
        const chain & gate = made.chains[0];
        const chain & up = made.chains[1];
        const int at = std::min(gate.node, up.node);
        const ggml_tensor & result = *g_.nodes[made.activation_node];
        std::vector<int> own = nodes_of(gate, user_);
        for (const int node : nodes_of(up, user_)) {
            own.push_back(node);
        }
        if (may_move(result, made.activation_node, at,
                     {g_.nodes[gate.node]->src[1], gate.bias, up.bias}, own)) {
            add_launch(at, made.chains, &result, made.units_per_part);
            return;
        }
        group apart = made;
        apart.activation_node = -1;
        if (up.node == gate.node) {
            apart.chains = std::vector<chain>(1, chain_of(gate.node));
        } else if (up.node < gate.node) {
            std::swap(apart.chains[0], apart.chains[1]);
        }
        place(apart);
    }

    void add_launch(int at, const std::vector<chain> & chains, const ggml_tensor * activation,
                    int units_per_part) {
        few_rows_plan::launch l;
        const ggml_tensor & x = *g_.nodes[chains[0].node]->src[1];
        few_rows::product & p = l.product;
        p.n_columns = static_cast<int>(x.ne[1]);
        p.k = static_cast<int>(x.ne[0]);
        p.units_per_part = units_per_part;
        p.n_matrices = static_cast<int>(chains.size());
        operands(chains, l.kernel);
        for (size_t i = 0; i < chains.size(); i++) {
            const chain & c = chains[i];
            const ggml_tensor & w = *g_.nodes[c.node]->src[0];
            const ggml_tensor & out = activation != nullptr ? *activation : *g_.nodes[c.last];
            few_rows::matrix & m = p.matrices[i];
            m.weights = static_cast<const unsigned char *>(w.data) + c.first_row * w.nb[1];
            m.row_bytes = w.nb[1];
            m.out = static_cast<float *>(out.data);
            m.out_stride = floats(out.nb[1]);
            m.bias = c.bias != nullptr ? static_cast<const float *>(c.bias->data) + c.first_row
                                       : nullptr;
            if (c.residual != nullptr) {
                m.residual = static_cast<const float *>(c.residual->data);
                m.residual_stride = floats(c.residual->nb[1]);
            }
            m.rows = static_cast<int>(c.n_rows);
            m.type = operand(c.node) == l.kernel.a ? 0 : 1;
            l.row_blocks +=
                activation != nullptr && i == 1
                    ? 0
                    : blocks_of(c.n_rows, activation != nullptr ? few_rows::BLOCK_ROWS / 2
                                                                : few_rows::BLOCK_ROWS);
            for (const int node : nodes_of(c, user_)) {
                if (state_[node] != state::fused) {
                    l.nodes.push_back(g_.nodes[node]);
                    state_[node] = state::fused;
                }
            }
        }
        if (activation != nullptr) {
            p.activation = activation_of(*activation);
            std::memcpy(&p.alpha, activation->op_params + 2, sizeof(float));
            std::memcpy(&p.limit, activation->op_params + 3, sizeof(float));
            l.nodes.push_back(activation);
            state_[index_.at(activation)] = state::fused;
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
            !is_computed(x) || only_user(index_.at(&norm)) != index_.at(&x) ||
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

    void emit() {
        int begin = 0;
        bool works = false;  // whether the nodes since `begin` do anything
        const auto flush = [&] {
            const int end = static_cast<int>(plan_.rest.size());
            if (works) {
                plan_.steps.push_back({false, static_cast<int>(plan_.segments.size())});
                plan_.segments.push_back({begin, end});
            }
            begin = end;
            works = false;
        };
        const ggml_tensor * converted = nullptr;  // the input that lies there converted
        const auto write = [&](const ggml_tensor & t) {
            if (converted != nullptr && range(t).overlaps(range(*converted))) {
                converted = nullptr;
            }
        };
        for (int i = 0; i < n_; i++) {
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
                    converted = x;
                    plan_.steps.push_back({true, index});
                    for (size_t n = 0; n < n_nodes; n++) {  // what is written after the conversion
                        write(*l.nodes[n]);
                    }
                }
            }
            if (state_[i] == state::fused) {
                continue;
            }
            ggml_tensor & t = *g_.nodes[i];
            plan_.rest.push_back(&t);
            if (!is_idle(t)) {
                works = true;
                write(t);
            }
        }
        flush();
    }

    const graph & g_;
    const few_rows_rules & rules_;
    const bool any_shape_;
    few_rows_plan plan_;
    int n_ = 0;
    std::vector<state> state_;
    std::unordered_map<const ggml_tensor *, int> index_;
    std::vector<int> user_, n_users_;  // the last reader of each node, and how many there are
    std::unordered_map<int, std::vector<int>> launches_at_;
};

}  // namespace

std::string few_rows_operand(ggml_type type, int64_t k) {
    const block_type * known = find_type(type);
    if (known == nullptr || k % 32 != 0 || k % ggml_blck_size(type) != 0) {
        return "";
    }
    return operand_name({type, has_aligned_units(*known, nullptr, k, ggml_row_size(type, k))});
}

std::string few_rows_kernel::name() const {
    return "product_" + operand_name(a) + "_" + operand_name(b) + "_" + std::to_string(tiles);
}

int few_rows_kernel::shared_bytes() const {
    return few_rows::product_shared_memory(ring_bytes(a), ring_bytes(b), tiles);
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

bool takes_matrix(const ggml_tensor & weight, const few_rows_rules & rules) {
    if (!is_readable(weight, rules)) {
        return false;
    }
    const auto o = operand_of(weight);
    return rules.has({o, o, 1}) && rules.is_faster(weight.type, weight.ne[0], weight.ne[1]);
}

bool order_few_rows(const graph & graph, const few_rows_rules & rules) {
    return planner(graph, rules, /*any_shape=*/true).order();
}

few_rows_plan plan_few_rows(const graph & graph, const few_rows_rules & rules) {
    return planner(graph, rules).run();
}

}  // namespace dflash
