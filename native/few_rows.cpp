#include "few_rows.h"

#include <algorithm>
#include <deque>
#include <list>
#include <unordered_set>
#include <utility>

#include "errors.h"
#include "few_rows_attention.h"
#include "few_rows_groups.h"
#include "graph_content.h"

namespace dflash {

namespace {

using private_abi::graph;

// A recording of an 8B target takes some MiB on host and GPU together; a session has some ten. With
// experts in RAM a pass is two small graphs a layer, and all of a few widths are to be kept.
constexpr size_t enough_recordings = 64, most_recorded_nodes = 16384;
// Graphs that came once: a long prompt has many that never come again.
constexpr size_t most_seen = 512;
constexpr size_t most_ids = 1024;

// No backend is freed while another one records: what it frees would end the recording.
std::mutex & recording_mutex() {
    static std::mutex mutex;
    return mutex;
}

class graph_runner {
  public:
    graph_runner(ggml_backend_t backend, std::shared_ptr<few_rows_engine> shared,
                 std::unique_ptr<few_rows_executor> executor)
        : backend_(backend),
          compute_(private_abi::of(backend).graph_compute),
          optimize_(private_abi::of(backend).graph_optimize),
          free_(private_abi::of(backend).free),
          shared_(std::move(shared)),
          executor_(std::move(executor)) {
        rules_.reads = [this](const ggml_tensor & t) { return executor_->reads(t); };
        rules_.has = [this](const few_rows_kernel & k) { return executor_->has(k); };
        rules_.is_faster = [this](ggml_type type, int64_t k, int64_t rows, int64_t n_rows) {
            return shared_->takes(type, k, rows, n_rows);
        };
        rules_.attends = [this](const few_rows_attention_kernel & k) {
            return shared_->takes_attention(k) && executor_->has(k);
        };
        rules_.takes_experts = [this](ggml_type type, int64_t k, int64_t rows, int64_t n_rows) {
            return shared_->takes_experts(type, k, rows, n_rows);
        };
        rules_.n_processors = executor_->n_processors();
    }

    ~graph_runner() {
        ggml_backend_synchronize(backend_);
        executor_->begin();
        forget();
    }

    bool takes(const ggml_tensor & weight, int64_t n_columns) const {
        return !is_aside_ && shared_->is_on() && takes_matrix(weight, n_columns, rules_);
    }

    auto original_free() const { return free_; }

    ggml_status run(ggml_cgraph * whole) {
        if (is_aside_) {
            return compute_(backend_, whole);
        }
        try {
            return run_graph(private_abi::of(whole));
        } catch (const std::exception & e) {
            is_aside_ = true;
            shared_->stand_aside(e.what());
            return GGML_STATUS_FAILED;  // some of it ran, and may not run again
        }
    }

    // Called when a graph is made, before it gets its memory.
    void optimize(ggml_cgraph * whole, void * parameters) {
        // Always, as graphs in another order would not fit the places of the first one.
        orders_.order(private_abi::of(whole), rules_);
        if (optimize_ != nullptr) {
            optimize_(backend_, whole, parameters);
        }
    }

  private:
    struct kept {
        graph_content content;
        std::unique_ptr<few_rows_executor::recording> recording;
        size_t n_nodes;
    };

    ggml_status run_graph(const graph & g) {
        executor_->begin();
        if (version_ != shared_->version()) {
            forget();
            version_ = shared_->version();
        }
        if (!executor_->records(g)) {
            return run_directly(g);
        }
        if (const auto same = by_id_.find(g.uid); g.uid != 0 && same != by_id_.end()) {
            return play(same->second);
        }
        content_.read(g);
        const uint64_t hash = content_.hash();
        const place known = find(content_);
        if (known != kept_.end()) {
            remember_id(g.uid, known);
            return play(known);
        }
        // What a graph needs besides memory, ggml makes when it first runs: that cannot be
        // recorded.
        if (seen_.insert(hash).second) {
            order_seen_.push_back(hash);
            if (order_seen_.size() > most_seen) {
                seen_.erase(order_seen_.front());
                order_seen_.pop_front();
            }
            return run_directly(g);
        }
        return record(g, std::move(content_));
    }

    using place = std::list<kept>::iterator;

    // The end of those kept, if it is none of them.
    place find(const graph_content & content) {
        const auto [first, last] = by_hash_.equal_range(content.hash());
        const auto found = std::find_if(
            first, last, [&](const auto & known) { return known.second->content == content; });
        return found == last ? kept_.end() : found->second;
    }

    ggml_status play(place at) {
        kept_.splice(kept_.begin(), kept_, at);
        executor_->play(*at->recording);
        shared_->counts().played++;
        return GGML_STATUS_SUCCESS;
    }

    ggml_status record(const graph & g, graph_content && content) {
        shared_->counts().repeated++;
        const few_rows_plan plan = make_plan(g);
        std::unique_ptr<few_rows_executor::recording> made;
        ggml_status status = GGML_STATUS_SUCCESS;
        {
            const std::lock_guard<std::mutex> alone(recording_mutex());
            made = executor_->record([&] { status = run_plan(g, plan); });
        }
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        if (!made) {  // nothing has run
            shared_->counts().direct++;
            return run_plan(g, plan);
        }
        while (kept_.size() >= enough_recordings && n_kept_nodes_ > most_recorded_nodes) {
            drop(std::prev(kept_.end()));
        }
        const uint64_t hash = content.hash();
        n_kept_nodes_ += g.n_nodes;
        kept_.push_front({std::move(content), std::move(made), static_cast<size_t>(g.n_nodes)});
        by_hash_.emplace(hash, kept_.begin());
        remember_id(g.uid, kept_.begin());
        executor_->play(*kept_.front().recording);
        shared_->counts().recorded++;
        return GGML_STATUS_SUCCESS;
    }

    void remember_id(uint64_t id, place at) {
        if (id == 0) {
            return;
        }
        if (by_id_.size() >= most_ids) {
            by_id_.clear();
        }
        by_id_[id] = at;
    }

    void drop(place at) {
        const auto [first, last] = by_hash_.equal_range(at->content.hash());
        for (auto i = first; i != last; ++i) {
            if (i->second == at) {
                by_hash_.erase(i);
                break;
            }
        }
        by_id_.clear();
        n_kept_nodes_ -= at->n_nodes;
        kept_.erase(at);
    }

    void forget() {
        by_id_.clear();
        by_hash_.clear();
        n_kept_nodes_ = 0;
        kept_.clear();
    }

    ggml_status run_directly(const graph & g) {
        shared_->counts().direct++;
        return run_plan(g, make_plan(g));
    }

    few_rows_plan make_plan(const graph & g) const {
        few_rows_plan plan = shared_->is_on() ? plan_few_rows(g, rules_) : few_rows_plan{};
        few_rows_counts & counts = shared_->counts();
        for (const few_rows_plan::launch & l : plan.launches) {
            counts.launches++;
            counts.conversions += l.converts;
            for (const ggml_tensor * node : l.nodes) {
                (node->op == GGML_OP_MUL_MAT ? counts.products : counts.fused)++;
            }
        }
        for (const few_rows_plan::plain & made : plan.plains) {
            counts.products += static_cast<long>(made.nodes.size());
            counts.launches++;
        }
        counts.attentions += static_cast<long>(plan.attentions.size());
        for (const few_rows_plan::experts & made : plan.of_experts) {
            std::vector<const ggml_tensor *> nodes = made.before;
            nodes.push_back(made.node);
            for (const ggml_tensor * node : nodes) {
                (node->op == GGML_OP_MUL_MAT_ID ? counts.experts : counts.fused)++;
            }
        }
        return plan;
    }

    ggml_status compute(const graph & whole, ggml_tensor ** nodes, int n) const {
        graph part = private_abi::part_of(whole, nodes, n);
        return compute_(backend_, reinterpret_cast<ggml_cgraph *>(&part));
    }

    ggml_status run_plan(const graph & g, const few_rows_plan & plan) const {
        if (plan.steps.size() == plan.segments.size()) {
            return compute(g, g.nodes, g.n_nodes);
        }
        const few_rows_executor::scratch scratch = executor_->reserve(
            plan.converted_bytes, plan.partial_floats, plan.n_counters, plan.n_items);
        std::vector<ggml_tensor *> nodes = plan.rest;
        for (const few_rows_plan::step & step : plan.steps) {
            if (step.kind == few_rows_plan::step::ATTENTION) {
                const few_rows_plan::attention & a = plan.attentions[step.index];
                executor_->attend(a, with_scratch(a, scratch.partials, scratch.converted));
                continue;
            }
            if (step.kind == few_rows_plan::step::PLAIN) {
                executor_->multiply(plan.plains[step.index]);
                continue;
            }
            if (step.kind == few_rows_plan::step::EXPERTS) {
                run_experts(plan.of_experts[step.index], scratch);
                continue;
            }
            if (step.kind == few_rows_plan::step::SEGMENT) {
                const few_rows_plan::segment & s = plan.segments[step.index];
                const ggml_status status = compute(g, nodes.data() + s.begin, s.end - s.begin);
                if (status != GGML_STATUS_SUCCESS) {
                    return status;
                }
                continue;
            }
            const few_rows_plan::launch & l = plan.launches[step.index];
            if (l.converts) {
                few_rows::normalization n = l.input;
                n.input.out = scratch.converted;
                if (l.normalizes) {
                    executor_->normalize(n);
                } else {
                    executor_->convert(n.input);
                }
            }
            few_rows::product p = l.product;
            p.x = scratch.converted;
            p.partials = scratch.partials;
            p.counters = scratch.counters;
            executor_->multiply(l, p);
        }
        return GGML_STATUS_SUCCESS;
    }

    void run_experts(const few_rows_plan::experts & planned,
                     const few_rows_executor::scratch & scratch) const {
        few_rows::chosen_input c = {planned.choice, planned.input};
        c.chosen.items = scratch.items;
        c.input.out = scratch.converted;
        if (planned.orders) {
            c.input.n_columns = planned.converts ? c.input.n_columns : 0;
            executor_->order(c);
        } else if (planned.converts) {
            executor_->convert(c.input);
        }
        few_rows::expert_product e = planned.arguments;
        e.items = scratch.items;
        e.base.x = scratch.converted;
        e.base.partials = scratch.partials;
        e.base.counters = scratch.counters;
        executor_->multiply(planned, e);
    }

    ggml_backend_t backend_;
    private_abi::backend::compute_function compute_;
    private_abi::backend::optimize_function optimize_;
    void (*free_)(ggml_backend_t);
    std::shared_ptr<few_rows_engine> shared_;
    std::unique_ptr<few_rows_executor> executor_;
    few_rows_rules rules_;
    known_orders orders_;
    graph_content content_;  // of the last graph
    bool is_aside_ = false;
    long version_ = 0;
    std::list<kept> kept_;  // the last played ones first
    size_t n_kept_nodes_ = 0;
    std::unordered_multimap<uint64_t, place> by_hash_;
    std::unordered_map<uint64_t, place> by_id_;
    std::unordered_set<uint64_t> seen_;
    std::deque<uint64_t> order_seen_;
};

// ggml's functions are given nothing but the backend, so its runner is found by that.
class runners {
  public:
    void add(ggml_backend_t backend, std::unique_ptr<graph_runner> runner) {
        const std::lock_guard<std::mutex> lock(mutex_);
        all_[backend] = std::move(runner);
    }
    graph_runner * find(ggml_backend_t backend) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = all_.find(backend);
        return found != all_.end() ? found->second.get() : nullptr;
    }
    std::unique_ptr<graph_runner> take(ggml_backend_t backend) {
        const std::lock_guard<std::mutex> lock(mutex_);
        auto node = all_.extract(backend);
        return std::move(node.mapped());
    }

  private:
    std::mutex mutex_;
    std::unordered_map<ggml_backend_t, std::unique_ptr<graph_runner>> all_;
};

// Never freed: backends that nobody has freed when the process ends may not be touched any more.
runners & known_runners() {
    static auto * known = new runners;
    return *known;
}

ggml_status compute_graph(ggml_backend_t backend, ggml_cgraph * graph) {
    return known_runners().find(backend)->run(graph);
}

void optimize_graph(ggml_backend_t backend, ggml_cgraph * graph, void * parameters) {
    known_runners().find(backend)->optimize(graph, parameters);
}

void free_backend(ggml_backend_t backend) {
    const std::lock_guard<std::mutex> alone(recording_mutex());
    std::unique_ptr<graph_runner> runner = known_runners().take(backend);
    const auto original = runner->original_free();
    runner.reset();
    original(backend);
}

}  // namespace

std::unique_ptr<few_rows_executor::recording> few_rows_executor::record(
    const std::function<void()> &) {
    return nullptr;
}

const few_rows_engine::cubins * few_rows_engine::kernels(const std::string & device) const {
    const auto found = kernels_.find(device);
    return found != kernels_.end() ? &found->second : nullptr;
}

void few_rows_engine::leave(ggml_type type, int64_t k, int64_t rows, pass_rows left) {
    left_[{type, k, rows}] = left;
    version_++;
}

bool few_rows_engine::takes(ggml_type type, int64_t k, int64_t rows, int64_t n_rows) const {
    return !has(left_, type, k, rows, n_rows);
}

bool few_rows_engine::has(const shapes & left, ggml_type type, int64_t k, int64_t rows,
                          int64_t n_rows) {
    const auto found = left.find({type, k, rows});
    return found != left.end() && n_rows >= found->second.first && n_rows <= found->second.last;
}

void few_rows_engine::leave_attention(ggml_type keys, ggml_type values, int head_dim) {
    left_attention_.insert({keys, values, head_dim});
    version_++;
}

bool few_rows_engine::takes_attention(const few_rows_attention_kernel & k) const {
    return left_attention_.count({k.keys, k.values, k.head_dim}) == 0;
}

void few_rows_engine::leave_experts(ggml_type type, int64_t k, int64_t rows, pass_rows left) {
    left_experts_[{type, k, rows}] = left;
    version_++;
}

bool few_rows_engine::takes_experts(ggml_type type, int64_t k, int64_t rows, int64_t n_rows) const {
    return !has(left_experts_, type, k, rows, n_rows);
}

void few_rows_engine::turn(bool on) {
    is_on_ = on;
    version_++;
}

std::string few_rows_engine::reason() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reason_;
}

void few_rows_engine::stand_aside(const std::string & why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (reason_.empty()) {
        reason_ = why;
    }
}

bool takes_few_rows(ggml_backend_t backend, const ggml_tensor * weight, int64_t n_columns) {
    const graph_runner * runner = known_runners().find(backend);
    return runner != nullptr && runner->takes(*weight, n_columns);
}

void run_graphs_of(ggml_backend_t backend, std::shared_ptr<few_rows_engine> shared,
                   std::unique_ptr<few_rows_executor> executor) {
    for (const std::string & doubt :
         {private_abi::doubt_graphs(), private_abi::doubt_backend(backend)}) {
        if (!doubt.empty()) {
            throw backend_error(doubt);
        }
    }
    known_runners().add(
        backend, std::make_unique<graph_runner>(backend, std::move(shared), std::move(executor)));
    private_abi::of(backend).graph_compute = compute_graph;
    private_abi::of(backend).graph_optimize = optimize_graph;
    private_abi::of(backend).free = free_backend;
}

}  // namespace dflash
