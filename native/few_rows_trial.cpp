#include "few_rows_trial.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
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

// Memory for all tensors of a context.
ggml_backend_buffer_ptr in_memory(ggml_context * tensors, ggml_backend_buffer_type_t type) {
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(tensors, type));
    if (!buffer) {
        throw backend_error("no room to try kernels");
    }
    return buffer;
}

// Microseconds of a graph, the least of some rounds.
double least_us(ggml_backend_t backend, ggml_cgraph * graph) {
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
        least = std::min(least, us_since(begin) / n_runs);
    }
    return least;
}

struct outcome {
    std::vector<float> first, last;  // two results, column by column
    double us;
};

// One kind of matrix on one device.
class product_trial {
  public:
    product_trial(ggml_backend_dev_t device, ggml_type type, int64_t k, int64_t rows)
        : k_(k),
          rows_(rows),
          context_(new_tensors(most_matrices + 1)),
          x_(normal_values(static_cast<size_t>(k) * most_columns, 1.0f, 2)) {
        const size_t bytes = ggml_row_size(type, k) * rows;
        const auto n = std::clamp<int>(static_cast<int>(least_bytes / bytes) + 1, 1, most_matrices);
        for (int i = 0; i < n; i++) {
            weights_.push_back(ggml_new_tensor_2d(context_.get(), type, k, rows));
        }
        buffer_ = in_memory(context_.get(), ggml_backend_dev_buffer_type(device));
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

    // Results with the first and with the last matrix.
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
        const ggml_backend_buffer_ptr buffer =
            in_memory(nodes.get(), ggml_backend_get_default_buffer_type(backend));
        for (ggml_tensor * x : inputs) {
            ggml_backend_tensor_set(x, x_.data(), 0, ggml_nbytes(x));
        }
        outcome found{std::vector<float>(rows_ * n_columns), std::vector<float>(rows_ * n_columns),
                      least_us(backend, graph) / n};
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
        if (type == GGML_TYPE_F32) {
            values_ = values;
        } else {
            ggml_get_type_traits(type)->to_float(some.data(), values_.data(), k_ * period);
        }
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

// Attention of one layer's shape: rows at the end of a cache, each of which sees one cell more.
class attention_trial {
  public:
    attention_trial(ggml_backend_dev_t device, ggml_type keys, ggml_type values, int head_dim,
                    int n_heads, int n_kv_heads)
        : head_dim_(head_dim),
          n_heads_(n_heads),
          n_kv_heads_(n_kv_heads),
          context_(new_tensors(2)),
          queries_(normal_values(static_cast<size_t>(head_dim) * n_heads * most_columns, 1.0f, 2)) {
        const ggml_type types[] = {keys, values};
        for (int i = 0; i < 2; i++) {
            caches_[i] =
                ggml_new_tensor_3d(context_.get(), types[i], head_dim, n_kv_heads, n_cells);
        }
        buffer_ = in_memory(context_.get(), ggml_backend_dev_buffer_type(device));
        for (int i = 0; i < 2; i++) {
            const std::vector<float> wanted =
                normal_values(static_cast<size_t>(ggml_nelements(caches_[i])), 1.0f, 3 + i);
            std::vector<unsigned char> bytes(ggml_nbytes(caches_[i]));
            ggml_quantize_chunk(types[i], wanted.data(), bytes.data(), 0, n_cells * n_kv_heads,
                                head_dim, nullptr);
            values_[i].resize(wanted.size());
            if (types[i] == GGML_TYPE_F16) {
                ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t *>(bytes.data()),
                                      values_[i].data(), static_cast<int64_t>(wanted.size()));
            } else {
                ggml_get_type_traits(types[i])->to_float(bytes.data(), values_[i].data(),
                                                         static_cast<int64_t>(wanted.size()));
            }
            ggml_backend_tensor_set(caches_[i], bytes.data(), 0, bytes.size());
        }
    }

    double error(const std::vector<float> & results) const {
        const size_t width = static_cast<size_t>(head_dim_) * n_heads_;
        double largest = 0.0;
        for (size_t column = 0; column * width < results.size(); column += 9) {
            for (int head = 0; head < n_heads_; head++) {
                const std::vector<double> expected = attended(static_cast<int>(column), head);
                const float * found = results.data() + column * width + head * head_dim_;
                double off = 0.0, size = 0.0;
                for (int i = 0; i < head_dim_; i++) {
                    off += std::pow(found[i] - expected[i], 2);
                    size += std::pow(expected[i], 2);
                }
                const double d = std::sqrt(off / size);
                largest = std::max(largest, std::isfinite(d) ? d : INFINITY);
            }
        }
        return largest;
    }

    // Results over all cells, and once more over fewer of them.
    outcome run(ggml_backend_t backend, int n_columns) const {
        const ggml_context_ptr nodes = new_nodes(32);
        ggml_cgraph * graph = ggml_new_graph_custom(nodes.get(), 32, false);
        ggml_tensor *q[2], *mask[2], *result[2];
        for (int i = 0; i < 2; i++) {
            ggml_context * ctx = nodes.get();
            q[i] = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, head_dim_, n_heads_, n_columns);
            mask[i] = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, cells(i), n_columns);
            ggml_tensor * of[2];
            for (int c = 0; c < 2; c++) {
                ggml_tensor * seen = ggml_view_3d(ctx, caches_[c], head_dim_, n_kv_heads_, cells(i),
                                                  caches_[c]->nb[1], caches_[c]->nb[2], 0);
                of[c] = ggml_permute(ctx, seen, 0, 2, 1, 3);
            }
            result[i] = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q[i], 0, 2, 1, 3), of[0], of[1],
                                            mask[i], scale(), 0.0f, 0.0f);
            ggml_prec_set_acc(result[i], GGML_PREC_F32);
            ggml_build_forward_expand(graph, result[i]);
        }
        const ggml_backend_buffer_ptr buffer =
            in_memory(nodes.get(), ggml_backend_get_default_buffer_type(backend));
        for (int i = 0; i < 2; i++) {
            ggml_backend_tensor_set(q[i], queries_.data(), 0, ggml_nbytes(q[i]));
            std::vector<ggml_fp16_t> hidden(ggml_nelements(mask[i]), ggml_fp32_to_fp16(-INFINITY));
            for (int column = 0; column < n_columns; column++) {
                std::fill_n(hidden.data() + column * cells(i), n_seen(column),
                            ggml_fp32_to_fp16(0.0f));
            }
            ggml_backend_tensor_set(mask[i], hidden.data(), 0, ggml_nbytes(mask[i]));
        }
        const double us = least_us(backend, graph) / 2;
        const auto n = static_cast<size_t>(ggml_nelements(result[0]));
        outcome found{std::vector<float>(n), std::vector<float>(n), us};
        ggml_backend_tensor_get(result[0], found.first.data(), 0, n * sizeof(float));
        ggml_backend_tensor_get(result[1], found.last.data(), 0, n * sizeof(float));
        return found;
    }

  private:
    static constexpr int n_cells = 2048, n_fewer = 1536;

    static int cells(int i) { return i == 0 ? n_cells : n_fewer; }
    static int n_seen(int column) { return 1400 + column; }
    float scale() const { return 2.0f / std::sqrt(static_cast<float>(head_dim_)); }

    std::vector<double> attended(int column, int head) const {
        const float * q =
            queries_.data() + (static_cast<size_t>(column) * n_heads_ + head) * head_dim_;
        const int kv_head = head / (n_heads_ / n_kv_heads_);
        std::vector<double> scores(n_seen(column)), sum(head_dim_, 0.0);
        double largest = -INFINITY, total = 0.0;
        const auto at = [&](int i, int cell) {
            return values_[i].data() +
                   (static_cast<size_t>(cell) * n_kv_heads_ + kv_head) * head_dim_;
        };
        for (int cell = 0; cell < n_seen(column); cell++) {
            double s = 0.0;
            for (int i = 0; i < head_dim_; i++) {
                s += static_cast<double>(q[i]) * at(0, cell)[i];
            }
            scores[cell] = s * scale();
            largest = std::max(largest, scores[cell]);
        }
        for (int cell = 0; cell < n_seen(column); cell++) {
            const double share = std::exp(scores[cell] - largest);
            total += share;
            for (int i = 0; i < head_dim_; i++) {
                sum[i] += share * at(1, cell)[i];
            }
        }
        for (double & x : sum) {
            x /= total;
        }
        return sum;
    }

    int head_dim_, n_heads_, n_kv_heads_;
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr buffer_;
    ggml_tensor * caches_[2];       // keys, values
    std::vector<float> values_[2];  // as floats
    std::vector<float> queries_;
};

// Experts of one kind, two sets of them.
class experts_trial {
  public:
    experts_trial(ggml_backend_dev_t device, ggml_type type, int64_t k, int64_t rows, int n_experts,
                  int n_used)
        : k_(k),
          rows_(rows),
          n_experts_(n_experts),
          n_used_(n_used),
          context_(new_tensors(2)),
          x_(normal_values(static_cast<size_t>(k) * most_columns, 1.0f, 2)) {
        for (auto & w : weights_) {
            w = ggml_new_tensor_3d(context_.get(), type, k, rows, n_experts);
        }
        buffer_ = in_memory(context_.get(), ggml_backend_dev_buffer_type(device));
        ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        const int64_t n_rows = period();
        const std::vector<float> values = normal_values(static_cast<size_t>(k * n_rows), 0.05f, 1);
        std::vector<unsigned char> some(ggml_row_size(type, k) * n_rows);
        const std::vector<float> importance(k, 1.0f);
        ggml_quantize_chunk(type, values.data(), some.data(), 0, n_rows, k, importance.data());
        values_.resize(values.size());
        ggml_get_type_traits(type)->to_float(some.data(), values_.data(), k * n_rows);
        std::vector<unsigned char> all(ggml_nbytes(weights_[0]));
        for (size_t at = 0; at < all.size(); at += some.size()) {
            std::copy_n(some.data(), std::min(some.size(), all.size() - at), all.data() + at);
        }
        for (ggml_tensor * w : weights_) {
            ggml_backend_tensor_set(w, all.data(), 0, all.size());
        }
        std::mt19937 random(3);
        std::vector<int> each(n_experts);
        for (int row = 0; row < most_columns; row++) {
            std::iota(each.begin(), each.end(), 0);
            std::shuffle(each.begin(), each.end(), random);
            ids_.insert(ids_.end(), each.begin(), each.begin() + n_used);
        }
    }

    double error(const std::vector<float> & results) const {
        double largest = 0.0;
        const size_t width = static_cast<size_t>(rows_) * n_used_;
        for (size_t row = 0; row * width < results.size(); row += 5) {
            for (int slot = 0; slot < n_used_; slot++) {
                const int64_t first = ids_[row * n_used_ + slot] * rows_;
                const float * found = results.data() + row * width + slot * rows_;
                double off = 0.0, size = 0.0;
                for (int64_t r = 0; r < rows_; r += 7) {
                    const float * w = values_.data() + (first + r) % period() * k_;
                    double expected = 0.0;
                    for (int64_t i = 0; i < k_; i++) {
                        expected += static_cast<double>(w[i]) * x_[row * k_ + i];
                    }
                    off += std::pow(found[r] - expected, 2);
                    size += expected * expected;
                }
                const double d = std::sqrt(off / size);
                largest = std::max(largest, std::isfinite(d) ? d : INFINITY);
            }
        }
        return largest;
    }

    outcome run(ggml_backend_t backend, int n_columns) const {
        const ggml_context_ptr nodes = new_nodes(16);
        ggml_cgraph * graph = ggml_new_graph_custom(nodes.get(), 16, false);
        ggml_tensor *x[2], *ids[2], *result[2];
        for (int i = 0; i < 2; i++) {
            x[i] = ggml_new_tensor_3d(nodes.get(), GGML_TYPE_F32, k_, 1, n_columns);
            ids[i] = ggml_new_tensor_2d(nodes.get(), GGML_TYPE_I32, n_used_, n_columns);
            result[i] = ggml_mul_mat_id(nodes.get(), weights_[i], x[i], ids[i]);
            ggml_build_forward_expand(graph, result[i]);
        }
        const ggml_backend_buffer_ptr buffer =
            in_memory(nodes.get(), ggml_backend_get_default_buffer_type(backend));
        for (int i = 0; i < 2; i++) {
            ggml_backend_tensor_set(x[i], x_.data(), 0, ggml_nbytes(x[i]));
            ggml_backend_tensor_set(ids[i], ids_.data(), 0, ggml_nbytes(ids[i]));
        }
        const double us = least_us(backend, graph) / 2;
        const auto n = static_cast<size_t>(ggml_nelements(result[0]));
        outcome found{std::vector<float>(n), std::vector<float>(n), us};
        ggml_backend_tensor_get(result[0], found.first.data(), 0, n * sizeof(float));
        ggml_backend_tensor_get(result[1], found.last.data(), 0, n * sizeof(float));
        return found;
    }

  private:
    int64_t period() const { return std::min(rows_ * n_experts_, row_period); }

    int64_t k_, rows_;
    int n_experts_, n_used_;
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr buffer_;
    ggml_tensor * weights_[2];
    std::vector<float> x_, values_;
    std::vector<int> ids_;
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

// `make` makes what is tried on a device; it has error() and run().
template <typename Make>
few_rows_trial compared(const std::string & name, few_rows_engine::cubins kernels,
                        const Make & make) {
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
    const auto tried = make(device);
    few_rows_trial found;
    outcome widest;
    for (auto n = std::rbegin(column_counts); n != std::rend(column_counts); ++n) {
        const outcome a = tried.run(by_ours.get(), *n), b = tried.run(by_ggml.get(), *n);
        const few_rows_counts & counts = ours->counts();
        if (counts.products + counts.attentions + counts.experts == 0) {
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

}  // namespace

few_rows_trial try_few_rows(const std::string & device, few_rows_engine::cubins kernels,
                            ggml_type type, int64_t k, int64_t rows) {
    return compared(device, std::move(kernels),
                    [&](ggml_backend_dev_t on) { return product_trial(on, type, k, rows); });
}

few_rows_trial try_few_rows_experts(const std::string & device, few_rows_engine::cubins kernels,
                                    ggml_type type, int64_t k, int64_t rows, int n_experts,
                                    int n_used) {
    return compared(device, std::move(kernels), [&](ggml_backend_dev_t on) {
        return experts_trial(on, type, k, rows, n_experts, n_used);
    });
}

few_rows_trial try_few_rows_attention(const std::string & device, few_rows_engine::cubins kernels,
                                      ggml_type keys, ggml_type values, int head_dim, int n_heads,
                                      int n_kv_heads) {
    return compared(device, std::move(kernels), [&](ggml_backend_dev_t on) {
        return attention_trial(on, keys, values, head_dim, n_heads, n_kv_heads);
    });
}

}  // namespace dflash
