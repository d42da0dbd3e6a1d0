#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "few_rows_plan.h"

namespace dflash {

// Runs ggml's graphs with our kernels for the products of few rows. ggml's function that computes a
// graph is replaced for single backends: it runs the nodes that are not ours in segments, by ggml's
// own function, with our launches between. A graph that comes again is recorded, and played from
// then on.

// Where launches run: a GPU, or in tests a CPU. Throws backend_error.
class few_rows_executor {
  public:
    // A recorded run of a graph.
    struct recording {
        virtual ~recording() = default;
    };
    struct scratch {
        unsigned char * converted;
        float * partials;
        unsigned * counters;  // all zero
        few_rows::expert_item * items;
    };

    virtual ~few_rows_executor() = default;

    // Called first in each run of a graph.
    virtual void begin() {}
    virtual bool reads(const ggml_tensor & t) const = 0;
    virtual bool has(const few_rows_kernel & kernel) const = 0;
    virtual bool has(const few_rows_attention_kernel & kernel) const = 0;
    virtual int n_processors() const = 0;
    // At least so much. Earlier scratch stays valid for recordings.
    virtual scratch reserve(size_t converted_bytes, size_t partial_floats, size_t n_counters,
                            size_t n_items) = 0;
    virtual void convert(const few_rows::conversion & c) = 0;
    virtual void normalize(const few_rows::normalization & n) = 0;
    virtual void multiply(const few_rows_plan::launch & l, const few_rows::product & p) = 0;

    // `arguments` are those of the plan, with scratch.
    virtual void attend(const few_rows_plan::attention & planned,
                        const few_rows::attention & arguments) = 0;

    virtual void multiply(const few_rows_plan::plain & planned) = 0;
    // With the input, unless that has no columns.
    virtual void order(const few_rows::chosen_input & c) = 0;
    // `arguments` are those of the plan, with scratch.
    virtual void multiply(const few_rows_plan::experts & planned,
                          const few_rows::expert_product & arguments) = 0;

    virtual bool records(const private_abi::graph &) const { return false; }
    // `run` is called between, once, and what it starts is recorded instead.
    virtual std::unique_ptr<recording> record(const std::function<void()> & run);
    virtual void play(recording &) {}
};

// What was done, for tests and for people.
struct few_rows_counts {
    std::atomic<long> repeated{0};     // graphs that came again without a recording
    std::atomic<long> direct{0};       // graphs that ran node by node
    std::atomic<long> recorded{0};     // that were recorded, and played for the first time
    std::atomic<long> played{0};       // that were played again
    std::atomic<long> products{0};     // of ggml in the plans made so far: those that are ours
    std::atomic<long> fused{0};        // other nodes that went into them
    std::atomic<long> launches{0};     // that they came to
    std::atomic<long> conversions{0};  // of inputs, before these
    std::atomic<long> attentions{0};   // in the plans made so far: those that are ours
    std::atomic<long> experts{0};      // likewise, products with experts
};

// What the backends of one model share: kernels, choices, counts. Changed by the thread that owns
// the model, while no graph of it runs.
class few_rows_engine {
  public:
    using cubins = std::vector<std::string>;

    // Kernels for a device of ggml, by its name. Without any, its graphs are recorded, no more.
    void add(const std::string & device, cubins kernels) { kernels_[device] = std::move(kernels); }
    const cubins * kernels(const std::string & device) const;

    // Passes of so many rows, both included.
    struct pass_rows {
        int64_t first;
        int64_t last;
    };
    // Leaves products with matrices of this type and shape to ggml, in such passes.
    void leave(ggml_type type, int64_t k, int64_t rows, pass_rows left);
    bool takes(ggml_type type, int64_t k, int64_t rows, int64_t n_rows) const;
    // Leaves attention with such caches and heads to ggml.
    void leave_attention(ggml_type keys, ggml_type values, int head_dim);
    bool takes_attention(const few_rows_attention_kernel & k) const;
    // Leaves products with such experts to ggml, in such passes.
    void leave_experts(ggml_type type, int64_t k, int64_t rows, pass_rows left);
    bool takes_experts(ggml_type type, int64_t k, int64_t rows, int64_t n_rows) const;
    // Off: ggml multiplies everything.
    void turn(bool on);
    bool is_on() const { return is_on_; }
    // Grows with each change of what is taken.
    long version() const { return version_; }

    few_rows_counts & counts() { return counts_; }
    // Empty, or why ggml computes as if we were not there.
    std::string reason() const;
    void stand_aside(const std::string & why);

  private:
    using shapes = std::map<std::tuple<int, int64_t, int64_t>, pass_rows>;
    static bool has(const shapes & left, ggml_type type, int64_t k, int64_t rows, int64_t n_rows);

    std::unordered_map<std::string, cubins> kernels_;
    shapes left_;
    shapes left_experts_;
    std::set<std::tuple<int, int, int>> left_attention_;
    bool is_on_ = true;
    long version_ = 0;
    few_rows_counts counts_;
    mutable std::mutex mutex_;
    std::string reason_;
};

// Whether products of this matrix with so many columns are ours on this backend.
bool takes_few_rows(ggml_backend_t backend, const ggml_tensor * weight, int64_t n_columns);

// The graphs of this backend run by `shared` from now on, until it is freed.
void run_graphs_of(ggml_backend_t backend, std::shared_ptr<few_rows_engine> shared,
                   std::unique_ptr<few_rows_executor> executor);

}  // namespace dflash
