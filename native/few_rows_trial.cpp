#include "few_rows_trial.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>

#include "backend.h"
#include "errors.h"
#include "few_rows_cuda.h"

namespace dflash {

namespace {

constexpr int column_counts[] = {1, 2, 4, 8, 16, 32, 64};
constexpr int most_columns = 64;
// Of all matrices that are multiplied in turn: more than the caches of today's GPUs hold.
constexpr size_t least_bytes = size_t{160} << 20;
constexpr int most_matrices = 24;
constexpr int64_t row_period = 37;  // rows of random weights: no multiple of what a warp takes
constexpr int warm_runs = 3;        // the second is recorded, the third played
constexpr int n_rounds = 3;
constexpr double round_us = 1500.0;

using clock_type = std::chrono::steady_clock;

double us_since(clock_type::time_point begin) {
    return std::chrono::duration<double, std::micro>(clock_type::now() - begin).count();
}

std::vector<float> normal_values(size_t n, float size, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, size);
    std::vector<float> values(n);
    std::generate(values.begin(), values.end(), [&] { return normal(random); });
    return values;
}

// One kind of matrix on one device.
class trial {
  public:
    trial(ggml_backend_dev_t device, ggml_type type, int64_t k, int64_t rows)
        : k_(k),
          rows_(rows),
          context_(new_tensors(most_matrices + 1)),
          x_(normal_values(static_cast<size_t>(k) * most_columns, 1.0f, 2)) {
        const size_t bytes = ggml_row_size(type, k) * rows;
        const auto n = std::clamp<int>(static_cast<int>(least_bytes / bytes) + 1, 1, most_matrices);
        for (int i = 0; i < n; i++) {
            weights_.push_back(ggml_new_tensor_2d(context_.get(), type, k, rows));
        }
        buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(
            context_.get(), ggml_backend_dev_buffer_type(device)));
        if (!buffer_) {
            throw backend_error("no room to try kernels");
        }
        ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        fill(type, bytes);
    }

    // The largest distance of a column of results from the same products in f64, over its length.
    double error(const std::vector<float> & results) const {
        const int64_t n_rows = std::min(rows_, row_period);
        double largest = 0.0;
        for (size_t column = 0; column * rows_ < results.size(); column++) {
            const float * x = x_.data() + column * k_;
            std::vector<double> expected(n_rows, 0.0);
            for (int64_t r = 0; r < n_rows; r++) {
                for (int64_t i = 0; i < k_; i++) {
                    expected[r] += static_cast<double>(values_[r * k_ + i]) * x[i];
                }
            }
            double off = 0.0, size = 0.0;
            for (int64_t r = 0; r < rows_; r++) {
                const double e = expected[r % n_rows];
                off += std::pow(results[column * rows_ + r] - e, 2);
                size += e * e;
            }
            const double d = std::sqrt(off / size);
            largest = std::max(largest, std::isfinite(d) ? d : INFINITY);
        }
        return largest;
    }

    struct outcome {
        std::vector<float> first, last;  // results with the first and with the last matrix
        double us;
    };

    outcome run(ggml_backend_t backend, int n_columns) const {
        const auto n = static_cast<int>(weights_.size());
        const ggml_context_ptr nodes = new_nodes(2 * most_matrices);
        ggml_cgraph * graph = ggml_new_graph_custom(nodes.get(), 2 * most_matrices, false);
        std::vector<ggml_tensor *> inputs, results;
        for (ggml_tensor * w : weights_) {  // an input each, as no two shall share a launch
            inputs.push_back(ggml_new_tensor_2d(nodes.get(), GGML_TYPE_F32, k_, n_columns));
            results.push_back(ggml_mul_mat(nodes.get(), w, inputs.back()));
            ggml_build_forward_expand(graph, results.back());
        }
        const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(nodes.get(), backend));
        if (!buffer) {
            throw backend_error("no room to try kernels");
        }
        for (ggml_tensor * x : inputs) {
            ggml_backend_tensor_set(x, x_.data(), 0, ggml_nbytes(x));
        }
        for (int i = 0; i < warm_runs; i++) {
            start_graph(backend, graph, "to multiply");
        }
        ggml_backend_synchronize(backend);
        auto begin = clock_type::now();
        start_graph(backend, graph, "to multiply");
        ggml_backend_synchronize(backend);
        const int n_runs = std::clamp(static_cast<int>(round_us / us_since(begin)), 1, 50);
        double least = INFINITY;
        for (int round = 0; round < n_rounds; round++) {
            begin = clock_type::now();
            for (int i = 0; i < n_runs; i++) {
                start_graph(backend, graph, "to multiply");
            }
            ggml_backend_synchronize(backend);
            least = std::min(least, us_since(begin) / (n_runs * n));
        }
        outcome found{std::vector<float>(rows_ * n_columns), std::vector<float>(rows_ * n_columns),
                      least};
        ggml_backend_tensor_get(results.front(), found.first.data(), 0,
                                ggml_nbytes(results.front()));
        ggml_backend_tensor_get(results.back(), found.last.data(), 0, ggml_nbytes(results.back()));
        return found;
    }

  private:
    void fill(ggml_type type, size_t bytes) {
        const int64_t period = std::min(rows_, row_period);
        std::vector<unsigned char> some(ggml_row_size(type, k_) * period);
        const std::vector<float> values = normal_values(static_cast<size_t>(k_ * period), 0.05f, 1);
        const std::vector<float> importance(k_, 1.0f);
        ggml_quantize_chunk(type, values.data(), some.data(), 0, period, k_, importance.data());
        values_.resize(values.size());
        ggml_get_type_traits(type)->to_float(some.data(), values_.data(), k_ * period);
        std::vector<unsigned char> all(bytes);
        for (size_t at = 0; at < bytes; at += some.size()) {
            std::copy_n(some.data(), std::min(some.size(), bytes - at), all.data() + at);
        }
        for (ggml_tensor * w : weights_) {
            ggml_backend_tensor_set(w, all.data(), 0, bytes);
        }
    }

    int64_t k_, rows_;
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr buffer_;
    std::vector<ggml_tensor *> weights_;
    std::vector<float> x_;
    std::vector<float> values_;  // of the weights: row_period rows, which come again
};

ggml_backend_ptr opened(ggml_backend_dev_t device, const std::shared_ptr<few_rows_engine> & engine,
                        bool on_cpu) {
    const few_rows_scope scope(engine, on_cpu);
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    if (!backend) {
        throw backend_error("no room to try kernels");
    }
    if (const std::string reason = engine->reason(); !reason.empty()) {
        throw backend_error(reason);
    }
    return backend;
}

}  // namespace

few_rows_trial try_few_rows(const std::string & name, few_rows_engine::cubins kernels,
                            ggml_type type, int64_t k, int64_t rows) {
    ggml_backend_dev_t device = ggml_backend_dev_by_name(name.c_str());
    if (device == nullptr) {
        throw backend_error("there is no device " + name);
    }
    const bool on_cpu = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
    const auto ours = std::make_shared<few_rows_engine>(),
               ggml = std::make_shared<few_rows_engine>();
    ours->add(name, std::move(kernels));
    ggml->turn(false);
    const ggml_backend_ptr by_ours = opened(device, ours, on_cpu);
    const ggml_backend_ptr by_ggml = opened(device, ggml, on_cpu);
    const trial tried(device, type, k, rows);
    few_rows_trial found;
    trial::outcome widest;
    for (auto n = std::rbegin(column_counts); n != std::rend(column_counts); ++n) {
        const trial::outcome a = tried.run(by_ours.get(), *n), b = tried.run(by_ggml.get(), *n);
        if (ours->counts().products == 0) {
            throw backend_error("no kernel of ours takes it");
        }
        if (const std::string reason = ours->reason(); !reason.empty()) {
            throw backend_error(reason);
        }
        for (const auto & [mine, most] :
             {std::pair(&a.first, &widest.first), std::pair(&a.last, &widest.last)}) {
            if (most->empty()) {
                found.error = std::max(found.error, tried.error(*mine));
            } else {
                found.same_bits =
                    found.same_bits && std::equal(mine->begin(), mine->end(), most->begin());
            }
        }
        if (widest.first.empty()) {
            widest = a;
        }
        found.columns.insert(found.columns.begin(), *n);
        found.ours_us.insert(found.ours_us.begin(), a.us);
        found.ggml_us.insert(found.ggml_us.begin(), b.us);
    }
    return found;
}

}  // namespace dflash
