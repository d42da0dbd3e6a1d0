// Attention of few rows, the kernels' own text run on the CPU, against the same in float64.

#include <algorithm>
#include <cmath>
#include <random>

#include "check.h"
#include "emulated_gpu.h"
#include "ggml.h"

#include "../../native/cuda/block_types.cuh"
#include "../../native/cuda/convert.cuh"

#include "../../native/cuda/attention.cuh"

namespace {

using few_rows::attention;

std::vector<float> normal_values(size_t n, int seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> x(n);
    std::generate(x.begin(), x.end(), [&] { return normal(random); });
    return x;
}

// Memory that begins at a multiple of 16 bytes.
template <typename T>
class block_of {
  public:
    explicit block_of(size_t n) : memory_(n * sizeof(T) / 16 + 1) {}
    T * at() { return reinterpret_cast<T *>(memory_.data()); }

  private:
    std::vector<few_rows::floats4> memory_;
};

// Rows of some sequences over their caches. A row sees cells of its own sequence, and not all.
struct task {
    int head_dim, n_heads, n_kv_heads, n_rows, n_cells;
    ggml_type type = GGML_TYPE_F16;
    int n_streams = 1;
    bool has_sinks = false;
    float soft_cap = 0.0f;
    int seen = 150;  // by the first row

    float scale() const { return 1.5f / std::sqrt(static_cast<float>(head_dim)); }
    // Prompts, a window, and gaps between the cells of a row.
    bool sees(int stream, int row, int cell) const {
        const int last = seen + 7 * row + stream;
        return cell <= last && cell % 11 != row % 3 && cell > last - 130;
    }
    size_t n_columns() const { return static_cast<size_t>(n_streams) * n_rows; }
};

struct cache {
    cache(const task & t, int seed)
        : values(normal_values(size(t), seed)),
          bytes(ggml_row_size(t.type, static_cast<int64_t>(size(t)))) {
        if (t.type == GGML_TYPE_F16) {
            ggml_fp32_to_fp16_row(values.data(), reinterpret_cast<ggml_fp16_t *>(bytes.at()),
                                  static_cast<int64_t>(values.size()));
            ggml_fp16_to_fp32_row(reinterpret_cast<ggml_fp16_t *>(bytes.at()), values.data(),
                                  static_cast<int64_t>(values.size()));
        } else {
            ggml_quantize_chunk(t.type, values.data(), bytes.at(), 0,
                                static_cast<int64_t>(values.size()) / t.head_dim, t.head_dim,
                                nullptr);
            ggml_get_type_traits(t.type)->to_float(bytes.at(), values.data(),
                                                   static_cast<int64_t>(values.size()));
        }
    }
    static size_t size(const task & t) {
        return static_cast<size_t>(t.n_streams) * t.n_cells * t.n_kv_heads * t.head_dim;
    }
    const float * at(const task & t, int stream, int cell, int head) const {
        return values.data() +
               ((static_cast<size_t>(stream) * t.n_cells + cell) * t.n_kv_heads + head) *
                   t.head_dim;
    }
    std::vector<float> values;
    block_of<unsigned char> bytes;
};

// Of the task's most rows and cells; runs with fewer take the first of them.
struct inputs {
    explicit inputs(const task & t)
        : keys(t, 1),
          values(t, 2),
          queries(normal_values(t.n_columns() * t.n_heads * t.head_dim, 3)),
          sinks(normal_values(t.n_heads, 4)) {}
    cache keys, values;
    std::vector<float> queries;  // [stream][row][head][head_dim]
    std::vector<float> sinks;
};

struct result {
    std::vector<float> rows;
    std::vector<unsigned char> converted;
};

template <typename T, int D, int GROUPS>
result attended(const task & all, inputs & in, int n_rows, int n_cells, bool converts = false) {
    task t = all;
    t.n_rows = n_rows;
    t.n_cells = n_cells;
    attention a = {};
    const int width = t.n_heads * D;
    block_of<float> q(in.queries.size());
    std::copy(in.queries.begin(), in.queries.end(), q.at());
    a.q = q.at();
    a.q_head = D;
    a.q_row = width;
    a.q_stream = static_cast<unsigned>(all.n_rows * width);
    const size_t head = ggml_row_size(t.type, D);
    a.k = in.keys.bytes.at();
    a.v = in.values.bytes.at();
    a.k_head = a.v_head = head;
    a.k_cell = a.v_cell = head * t.n_kv_heads;
    a.k_stream = a.v_stream = a.k_cell * all.n_cells;
    std::vector<unsigned short> mask(t.n_columns() * n_cells);
    for (int s = 0; s < t.n_streams; s++) {
        for (int r = 0; r < n_rows; r++) {
            for (int c = 0; c < n_cells; c++) {
                mask[(static_cast<size_t>(s) * n_rows + r) * n_cells + c] =
                    t.sees(s, r, c) ? 0 : 0xfc00;
            }
        }
    }
    a.mask = mask.data();
    a.mask_row = n_cells;
    a.mask_stream = static_cast<unsigned>(n_rows * n_cells);
    a.sinks = t.has_sinks ? in.sinks.data() : nullptr;
    a.head_dim = D;
    a.n_heads = t.n_heads;
    a.n_kv_heads = t.n_kv_heads;
    const unsigned group = t.n_heads / t.n_kv_heads;
    a.group_inverse = ((1ull << 32) + group - 1) / group;
    a.n_rows = n_rows;
    a.n_streams = t.n_streams;
    a.n_cells = n_cells;
    while (few_rows::chunk_begin(a.n_chunks, a.n_kv_heads, D) < n_cells) {
        a.n_chunks++;
    }
    a.scale = t.scale();
    a.soft_cap = t.soft_cap;
    block_of<unsigned short> means(t.n_columns() * t.n_heads * a.n_chunks * D);
    block_of<float> totals(t.n_columns() * t.n_heads * a.n_chunks * 2), out(t.n_columns() * width);
    a.means = means.at();
    a.totals = totals.at();
    a.out = out.at();
    const int units = (width + few_rows::UNIT - 1) / few_rows::UNIT;
    a.n_tiles = 1;
    while (a.n_tiles * 8 < static_cast<int>(t.n_columns())) {
        a.n_tiles *= 2;
    }
    block_of<unsigned char> converted(static_cast<size_t>(units) * a.n_tiles *
                                      few_rows::TILE_BYTES);
    a.converted = converts ? converted.at() : nullptr;

    const int n_queries = n_rows * (t.n_heads / t.n_kv_heads);
    emulated::launch(
        {(n_queries + GROUPS * 16 - 1) / (GROUPS * 16), t.n_kv_heads * t.n_streams, a.n_chunks},
        few_rows::attention_threads(D, GROUPS),
        few_rows::attention_shared_memory(D, GROUPS, t.n_heads / t.n_kv_heads, T::ARE_BLOCKS,
                                          T::ARE_BLOCKS),
        [&] { few_rows::attend<T, T, D, GROUPS>(a); });
    const int columns = converts ? a.n_tiles * 8 : static_cast<int>(t.n_columns());
    emulated::launch({units, columns}, few_rows::BLOCK_THREADS, few_rows::COMBINE_SHARED,
                     [&] { combine_chunks(a); });
    result r;
    r.rows.assign(out.at(), out.at() + t.n_columns() * width);
    if (converts) {
        r.converted.assign(converted.at(), converted.at() + static_cast<size_t>(units) * a.n_tiles *
                                                                few_rows::TILE_BYTES);
    }
    return r;
}

std::vector<double> reference(const task & t, const inputs & in, int stream, int row, int head) {
    const float * q =
        in.queries.data() +
        ((static_cast<size_t>(stream) * t.n_rows + row) * t.n_heads + head) * t.head_dim;
    const int kv_head = head / (t.n_heads / t.n_kv_heads);
    std::vector<double> sum(t.head_dim, 0.0);
    double total = t.has_sinks ? std::exp(static_cast<double>(in.sinks[head])) : 0.0;
    for (int c = 0; c < t.n_cells; c++) {
        if (!t.sees(stream, row, c)) {
            continue;
        }
        double score = 0.0;
        for (int i = 0; i < t.head_dim; i++) {
            score += static_cast<double>(q[i]) * in.keys.at(t, stream, c, kv_head)[i];
        }
        score *= t.scale();
        score = t.soft_cap != 0.0f ? t.soft_cap * std::tanh(score / t.soft_cap) : score;
        total += std::exp(score);
        for (int i = 0; i < t.head_dim; i++) {
            sum[i] += std::exp(score) * in.values.at(t, stream, c, kv_head)[i];
        }
    }
    for (double & x : sum) {
        x /= total;
    }
    return sum;
}

// Halves keep eleven bits of queries, keys and shares.
constexpr double CLOSE = 2e-3;

template <typename T, int D, int GROUPS>
void right(const task & t) {
    inputs in(t);
    const result all = attended<T, D, GROUPS>(t, in, t.n_rows, t.n_cells);
    for (int s = 0; s < t.n_streams; s++) {
        for (int r = 0; r < t.n_rows; r += 3) {
            for (int h = 0; h < t.n_heads; h++) {
                const std::vector<double> expected = reference(t, in, s, r, h);
                double off = 0.0, size = 0.0;
                for (int i = 0; i < D; i++) {
                    const float x =
                        all.rows[((static_cast<size_t>(s) * t.n_rows + r) * t.n_heads + h) * D + i];
                    off += std::pow(x - expected[i], 2);
                    size += std::pow(expected[i], 2);
                }
                check::that(std::sqrt(off / size) < CLOSE,
                            "heads of " + std::to_string(D) + ": row " + std::to_string(r) +
                                ", head " + std::to_string(h) + " is off by " +
                                std::to_string(std::sqrt(off / size)));
            }
        }
    }
}

void attention_is_right() {
    using namespace few_rows;
    right<F16_cells, 128, 4>({128, 8, 2, 7, 300});
    right<F16_cells, 64, 1>({64, 6, 2, 2, 200, GGML_TYPE_F16, 1, true});
    right<F16_cells, 112, 1>({112, 6, 2, 2, 230});
    right<F16_cells, 80, 2>({80, 2, 2, 4, 200});
    right<F16_cells, 256, 2>({256, 4, 1, 4, 256, GGML_TYPE_F16, 1, false, 3.0f});
    right<F16_cells, 96, 1>({96, 3, 3, 1, 1300});
    // Chunks of 256 cells, so that all stages are filled again.
    right<F16_cells, 64, 4>({64, 8, 1, 7, 4416, GGML_TYPE_F16, 1, false, 0.0f, 4370});
    right<Q8_0_cells, 64, 2>({64, 8, 1, 4, 4416, GGML_TYPE_Q8_0, 1, false, 0.0f, 4380});
    right<Q8_0_cells, 128, 2>({128, 4, 2, 4, 256, GGML_TYPE_Q8_0, 2});
}

// A row's bits depend neither on the rows beside it, nor on the tiles, nor on cells behind those
// that it sees.
void a_row_has_the_same_bits_beside_any_others() {
    using few_rows::F16_cells;
    const task t = {128, 8, 2, 16, 640};
    inputs in(t);
    const std::vector<float> all = attended<F16_cells, 128, 4>(t, in, 16, 640).rows;
    const auto begins = [&](const std::vector<float> & part, const std::string & what) {
        check::that(std::equal(part.begin(), part.end(), all.begin()), "other bits " + what);
    };
    begins(attended<F16_cells, 128, 1>(t, in, 1, 320).rows, "alone");
    begins(attended<F16_cells, 128, 2>(t, in, 3, 384).rows, "beside two");
    begins(attended<F16_cells, 128, 1>(t, in, 16, 320).rows, "of smaller blocks");
}

void the_result_is_converted_as_the_input_of_a_product() {
    using few_rows::F16_cells;
    const task t = {80, 5, 5, 9, 256};
    inputs in(t);
    const result found = attended<F16_cells, 80, 2>(t, in, 9, 256, true);
    block_of<float> x(found.rows.size());
    std::copy(found.rows.begin(), found.rows.end(), x.at());
    block_of<unsigned char> expected(found.converted.size());
    few_rows::conversion c = {x.at(), 400, expected.at(), 400, 9, 2};
    emulated::launch({2 * 2}, few_rows::BLOCK_THREADS, 0, [&] { convert_input(c); });
    check::that(std::equal(found.converted.begin(), found.converted.end(), expected.at()),
                "other halves than those of a conversion by itself");
    check::that(found.rows == attended<F16_cells, 80, 2>(t, in, 9, 256).rows, "other rows");
}

const check::tests few_rows_attention_tests = {
    {"attention of few rows is right", attention_is_right},
    {"a row has the same bits beside any others", a_row_has_the_same_bits_beside_any_others},
    {"the result is converted as the input of a product",
     the_result_is_converted_as_the_input_of_a_product},
};

}  // namespace
