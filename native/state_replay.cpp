#include "state_replay.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>

#include "backend.h"
#include "errors.h"

namespace dflash {

namespace {

constexpr std::string_view states_name = "cache_s_l";
// Kimi Linear's graph gives the second name to the same tensors.
constexpr std::string_view inputs_names[] = {"cache_r_l", "conv_states_all-"};

ggml_tensor * root(ggml_tensor * t) { return t->view_src != nullptr ? t->view_src : t; }

bool begins(const ggml_tensor * t, std::string_view with) {
    return std::string_view(t->name).substr(0, with.size()) == with;
}

// The layer, as text, of the last inputs of convolutions that llama.cpp keeps in a tensor; empty if
// it is another tensor.
std::string_view layer_of_inputs(const ggml_tensor * t) {
    for (const std::string_view name : inputs_names) {
        if (begins(t, name)) {
            return std::string_view(t->name).substr(name.size());
        }
    }
    return {};
}

// Whether a tensor is a part of llama.cpp's memory other than the cells of attention.
bool is_state(const ggml_tensor * t) {
    const bool is_cache = begins(t, "cache_") && !begins(t, "cache_k_") && !begins(t, "cache_v_");
    return t->op == GGML_OP_NONE && (is_cache || !layer_of_inputs(t).empty());
}

// The rows of one sequence in a tensor of ours over another's memory.
ggml_tensor * alias(ggml_context * c, ggml_tensor * t, std::array<int64_t, 4> ne, size_t offset) {
    ggml_tensor * mine = ggml_new_tensor(c, t->type, 4, ne.data());
    std::copy_n(t->nb, 4, mine->nb);
    mine->data = static_cast<char *>(t->data) + offset;
    mine->buffer = root(t)->buffer;
    return mine;
}

// A tensor of ours over all of another's memory, for views of it.
ggml_tensor * whole(ggml_context * c, ggml_tensor * t) {
    return alias(c, t, {t->ne[0], t->ne[1], t->ne[2], t->ne[3]}, 0);
}

// From one sequence to the next in a view whose last dimension they are, or which has one dimension
// for all of them.
size_t sequence_stride(const ggml_tensor * t, int64_t n_seqs) {
    int last = 3;
    while (last > 0 && t->ne[last] == 1) {
        last--;
    }
    return last > 0 ? t->nb[last] : ggml_nbytes(t) / n_seqs;
}

}  // namespace

// One layer in llama.cpp's graph. All but `inputs` are null for one that is only a convolution.
struct state_replay::net {
    ggml_tensor * result = nullptr;  // of the operation
    ggml_tensor * keys = nullptr;    // [head_dim, n_heads, n_rows, n_seqs], the values as well
    ggml_tensor * values = nullptr;
    ggml_tensor * gate = nullptr;  // [1 or head_dim, n_heads, n_rows, n_seqs]
    ggml_tensor * beta = nullptr;
    ggml_tensor * state = nullptr;     // [head_dim, head_dim, n_heads, n_seqs], before the pass
    ggml_tensor * to_state = nullptr;  // where it goes
    // Last inputs of a convolution, a view of all of them, and where they go.
    std::vector<std::pair<ggml_tensor *, ggml_tensor *>> inputs = {};
};

// The nets of a device, and the graphs that replay them: one for each sequence of a pass and each
// number of rows that stay.
struct state_replay::device {
    struct replay {
        ggml_context_ptr nodes;
        ggml_cgraph * graph = nullptr;
    };

    ggml_backend_ptr backend;
    ggml_gallocr_ptr allocator;
    std::vector<const net *> nets;
    std::map<std::pair<int64_t, int32_t>, replay> graphs;
    bool is_running = false;

    // Throws backend_error if there is no room.
    ggml_cgraph * graph(int64_t seq, int32_t n_kept, int64_t n_rows) {
        const auto known = graphs.find({seq, n_kept});
        if (known != graphs.end()) {
            return known->second.graph;
        }
        replay built = build(seq, n_kept, n_rows);
        wait();
        if (!allocate(allocator.get(), built.graph, graphs)) {
            throw backend_error(std::string("no room on ") + ggml_backend_name(backend.get()) +
                                " to put recurrent states right");
        }
        return graphs.emplace(std::make_pair(seq, n_kept), std::move(built)).first->second.graph;
    }

    replay build(int64_t seq, int32_t n_kept, int64_t n_rows) const {
        size_t n_inputs = 0;
        for (const net * n : nets) {
            n_inputs += n->inputs.size();
        }
        const size_t n_nodes = 10 * nets.size() + 6 * n_inputs;
        replay built;
        built.nodes = new_nodes(n_nodes);
        built.graph = ggml_new_graph_custom(built.nodes.get(), n_nodes, false);
        for (const net * n : nets) {
            if (n->result != nullptr) {
                add_state(built, *n, seq, n_kept);
            }
            for (const auto & [from, to] : n->inputs) {
                add_inputs(built, from, to, seq, n_rows - n_kept);
            }
        }
        return built;
    }

    static void add_state(replay & built, const net & n, int64_t seq, int32_t n_kept) {
        ggml_context * c = built.nodes.get();
        const auto rows = [&](ggml_tensor * t) {
            return alias(c, t, {t->ne[0], t->ne[1], n_kept, 1}, seq * t->nb[3]);
        };
        const auto & s = n.state->ne;
        ggml_tensor * before = alias(c, n.state, {s[0], s[1], s[2], 1}, seq * n.state->nb[3]);
        ggml_tensor * keys = rows(n.keys);
        ggml_tensor * values = rows(n.values);
        // Its other result, the layer's output, needs queries. Keys do as well: nothing reads it.
        ggml_tensor * computed = ggml_gated_delta_net(c, keys, keys, values, rows(n.gate),
                                                      rows(n.beta), before, /*K=*/1);
        const int64_t size = s[0] * s[1] * s[2];
        const int64_t n_output = values->ne[0] * values->ne[1] * n_kept;
        ggml_tensor * after = ggml_view_1d(c, computed, size, n_output * sizeof(float));
        ggml_tensor * cells = whole(c, root(n.to_state));
        // Two dimensions, as llama.cpp has it: CUDA then writes there without a copy.
        ggml_tensor * to =
            ggml_view_2d(c, cells, size, 1, cells->nb[1],
                         n.to_state->view_offs + seq * sequence_stride(n.to_state, n.state->ne[3]));
        ggml_build_forward_expand(built.graph, ggml_cpy(c, after, to));
    }

    static void add_inputs(replay & built, ggml_tensor * from, ggml_tensor * to, int64_t seq,
                           int64_t n_returned) {
        ggml_context * c = built.nodes.get();
        ggml_tensor * last =
            ggml_view_2d(c, whole(c, root(from)), from->ne[0], from->ne[1], from->nb[1],
                         from->view_offs - n_returned * from->nb[0] + seq * from->nb[2]);
        ggml_tensor * place = ggml_view_1d(c, whole(c, root(to)), from->ne[0] * from->ne[1],
                                           to->view_offs + seq * sequence_stride(to, from->ne[2]));
        ggml_build_forward_expand(built.graph, ggml_cpy(c, last, place));
    }

    // Whether it can use all memory and do all steps of a graph.
    bool can(ggml_cgraph * graph) const {
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            const ggml_tensor * node = ggml_graph_node(graph, i);
            if (!ggml_backend_supports_op(backend.get(), node)) {
                return false;
            }
            for (const ggml_tensor * source : node->src) {
                if (source != nullptr && source->buffer != nullptr &&
                    !ggml_backend_supports_buft(backend.get(),
                                                ggml_backend_buffer_get_type(source->buffer))) {
                    return false;
                }
            }
        }
        return true;
    }

    void start(ggml_cgraph * graph) {
        start_graph(backend.get(), graph, "on recurrent states");
        is_running = true;
    }

    void wait() {
        if (is_running) {
            ggml_backend_synchronize(backend.get());
            is_running = false;
        }
    }
};

state_replay::state_replay(llama_context * ctx, int n_returned,
                           std::shared_ptr<thread_pool> threads)
    : memory_(private_abi::hybrid_memory::of(ctx)),
      n_returned_(n_returned),
      threads_(std::move(threads)) {
    if (!threads_) {
        throw std::invalid_argument("a replay needs a thread pool");
    }
    if (!memory_.is_known()) {
        throw std::invalid_argument("the memory of this context cannot be edited");
    }
}

state_replay::~state_replay() {
    for (const auto & device : devices_) {
        device->wait();
    }
}

void state_replay::mark(ggml_context * nodes, ggml_cgraph * graph) {
    nets_.clear();
    graph_ = graph;
    is_open_ = false;
    for (const auto & device : devices_) {
        device->graphs.clear();
        device->nets.clear();
    }
    if (!is_complete(graph)) {
        nets_.clear();
        return;
    }
    for (ggml_tensor * t : consumed()) {
        ggml_set_output(t);
    }
    // ggml takes over the places of tensors from the last graph that had as many nodes and was as
    // large, whatever has become an output since. So a graph that is marked has one node more.
    ggml_tensor * more = ggml_cont(nodes, ggml_view_1d(nodes, consumed().front(), 1, 0));
    ggml_build_forward_expand(graph, more);
}

// The tensors that hold what all nets have consumed.
std::vector<ggml_tensor *> state_replay::consumed() const {
    std::vector<ggml_tensor *> found;
    for (const net & n : nets_) {
        for (const auto & input : n.inputs) {
            found.push_back(root(input.first));
        }
        if (n.result == nullptr) {
            continue;
        }
        for (ggml_tensor * t : {n.keys, n.values, n.gate, n.beta, n.state}) {
            found.push_back(root(t));
        }
    }
    return found;
}

// Whether no later step of the pass has written over what was to be kept.
bool state_replay::is_kept() const {
    std::map<const char *, const ggml_tensor *> by_begin;
    for (const ggml_tensor * t : consumed()) {
        by_begin[static_cast<const char *>(t->data)] = t;
    }
    std::set<const ggml_tensor *> done;
    for (int i = 0; i < ggml_graph_n_nodes(graph_); i++) {
        ggml_tensor * node = ggml_graph_node(graph_, i);
        const auto * begin = static_cast<const char *>(node->data);
        auto next = by_begin.lower_bound(begin + ggml_nbytes(node));
        while (next != by_begin.begin()) {
            const ggml_tensor * kept = (--next)->second;
            if (static_cast<const char *>(kept->data) + ggml_nbytes(kept) <= begin) {
                break;
            }
            if (kept != root(node) && done.count(kept) != 0) {
                return false;
            }
        }
        done.insert(node);
    }
    // Two that began at the same place would be one of them.
    const auto all = consumed();
    return by_begin.size() == std::set<ggml_tensor *>(all.begin(), all.end()).size();
}

// Finds the nets of a graph, and where their states go. False: its rows cannot be taken back, or
// need not be.
bool state_replay::is_complete(ggml_cgraph * graph) {
    std::map<const ggml_tensor *, size_t> of_result;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_GATED_DELTA_NET) {
            of_result[node] = nets_.size();
            nets_.push_back(
                {node, node->src[1], node->src[2], node->src[3], node->src[4], node->src[5]});
        }
    }
    const bool has_nets = !nets_.empty();
    std::map<std::string_view, size_t> of_layer;  // by the end of the name
    std::vector<std::pair<ggml_tensor *, ggml_tensor *>> inputs;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op != GGML_OP_CPY || ggml_nelements(node) == 0) {
            continue;
        }
        ggml_tensor *from = node->src[0], *to = node->src[1];
        if (root(from)->op == GGML_OP_GET_ROWS || !is_state(root(to))) {
            continue;  // it moves the states of other sequences, or writes no state
        }
        const auto found = of_result.find(root(from));
        if (found != of_result.end() && begins(root(to), states_name)) {
            nets_[found->second].to_state = to;
            of_layer[std::string_view(root(to)->name).substr(states_name.size())] = found->second;
        } else if (!layer_of_inputs(root(to)).empty() && root(from)->op == GGML_OP_CONCAT) {
            inputs.emplace_back(from, to);
        } else {
            return false;  // a state of another kind
        }
    }
    if (inputs.empty()) {
        return false;
    }
    const ggml_tensor * last = inputs[0].first;
    n_rows_ = root(inputs[0].first)->ne[0] - last->ne[0];
    n_seqs_ = last->ne[2];
    if (n_rows_ < 2 || n_rows_ > 1 + n_returned_) {
        return false;
    }
    for (const auto & input : inputs) {
        auto layer = of_layer.find(layer_of_inputs(root(input.second)));
        if (layer == of_layer.end() && has_nets) {
            return false;
        }
        if (layer == of_layer.end()) {
            layer = of_layer.emplace(layer_of_inputs(root(input.second)), nets_.size()).first;
            nets_.emplace_back();
        }
        nets_[layer->second].inputs.push_back(input);
    }
    const auto fits = [this](const net & n) {
        return n.to_state != nullptr && n.to_state->type == GGML_TYPE_F32 &&
               n.state->ne[3] == n_seqs_ && n.keys->ne[2] == n_rows_ && n.keys->ne[3] == n_seqs_ &&
               n.values->ne[2] == n_rows_ && n.values->ne[3] == n_seqs_;
    };
    return std::all_of(nets_.begin(), nets_.end(), [&](const net & n) {
        return (n.result == nullptr || fits(n)) && !n.inputs.empty() &&
               std::all_of(n.inputs.begin(), n.inputs.end(), [this](const auto & input) {
                   const auto & [from, to] = input;
                   return from->type == to->type && from->ne[2] == n_seqs_ &&
                          root(from)->ne[0] == from->ne[0] + n_rows_;
               });
    });
}

// Gives the nets to the devices that hold their states. False if one of them cannot replay them.
bool state_replay::open() {
    for (const net & n : nets_) {
        ggml_tensor * kept = root(n.inputs[0].second);  // on the device of all that it keeps
        ggml_backend_dev_t at = device_of(kept->buffer);
        auto found = std::find_if(devices_.begin(), devices_.end(), [at](const auto & device) {
            return ggml_backend_get_device(device->backend.get()) == at;
        });
        if (found == devices_.end()) {
            auto opened = std::make_unique<device>();
            opened->backend = open_backend(at, threads_->n_threads());
            opened->allocator.reset(
                ggml_gallocr_new(ggml_backend_get_default_buffer_type(opened->backend.get())));
            found = devices_.insert(devices_.end(), std::move(opened));
        }
        (*found)->nets.push_back(&n);
    }
    return std::all_of(devices_.begin(), devices_.end(), [this](const auto & device) {
        return device->can(device->build(0, 1, n_rows_).graph);
    });
}

void state_replay::begin_pass() {
    try {
        wait();
    } catch (...) {
        parts_.clear();  // tried once; the caller forgets these states
        throw;
    }
    parts_.clear();
}

bool state_replay::end_pass(const std::vector<int32_t> & seqs,
                            const std::vector<int32_t> & positions) {
    if (nets_.empty() || static_cast<int64_t>(seqs.size()) != n_rows_ * n_seqs_) {
        return false;
    }
    if (!is_open_ && !(is_kept() && open())) {
        nets_.clear();
        return false;
    }
    is_open_ = true;
    const auto n_rows = static_cast<int32_t>(n_rows_);
    for (size_t i = 0; i < seqs.size(); i += n_rows) {
        const bool is_whole = std::all_of(seqs.begin() + i, seqs.begin() + i + n_rows,
                                          [&](int32_t seq) { return seq == seqs[i]; });
        const bool is_new = std::none_of(parts_.begin(), parts_.end(),
                                         [&](const part & p) { return p.seq == seqs[i]; });
        if (!is_whole || !is_new) {
            parts_.clear();
            return false;
        }
        parts_.push_back({seqs[i], positions[i], n_rows, false});
    }
    return true;
}

void state_replay::keep(int32_t seq, int32_t n_kept) {
    const auto found =
        std::find_if(parts_.begin(), parts_.end(), [seq](const part & p) { return p.seq == seq; });
    if (found == parts_.end() || n_kept < 1 || n_kept > found->n_kept) {
        throw std::invalid_argument("sequence " + std::to_string(seq) + " cannot keep " +
                                    std::to_string(n_kept) + " rows of the last pass");
    }
    if (n_kept == found->n_kept) {
        return;
    }
    if (!memory_.remove(seq, found->begin + n_kept, -1)) {
        throw backend_error("llama.cpp did not give up the rejected rows of a pass");
    }
    memory_.shift(seq, n_kept - found->n_kept);
    found->n_kept = n_kept;
    found->is_waiting = true;
}

void state_replay::start() {
    for (size_t i = 0; i < parts_.size(); i++) {
        if (!parts_[i].is_waiting) {
            continue;
        }
        for (const auto & device : devices_) {
            if (!device->nets.empty()) {
                threads_->attach(device->backend.get(), threads_->n_threads());
                device->start(device->graph(i, parts_[i].n_kept, n_rows_));
            }
        }
        // Not before: what has failed is tried again, from the same inputs.
        parts_[i].is_waiting = false;
    }
}

void state_replay::wait() {
    start();
    for (const auto & device : devices_) {
        device->wait();
    }
}

}  // namespace dflash
