// The kernels for few rows, their own text run on the CPU, against products in float64.

#include <algorithm>
#include <cmath>
#include <random>

#include "check.h"
#include "emulated_gpu.h"
#include "ggml.h"

// The kernels get these tables from Python's gguf, and here from ggml's own floats.
#define FEW_ROWS_GRIDS
static unsigned iq3_xxs_grid[256], iq3_s_grid[512];

#include "../../native/cuda/block_types.cuh"
#include "../../native/cuda/convert.cuh"
#include "../../native/cuda/product.cuh"

namespace {

using few_rows::product;

// A matrix of random weights in blocks of a type, and what they are as floats.
struct weights {
    weights(ggml_type block_type, int n_rows, int k, int seed, float size = 0.05f)
        : type(block_type), rows(n_rows), k(k), row_bytes(ggml_row_size(block_type, k)) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        std::vector<float> x(static_cast<size_t>(rows) * k);
        for (float & v : x) {
            v = normal(random) * size;
        }
        bytes.resize(rows * row_bytes + 16);
        at = bytes.data() + (16 - reinterpret_cast<uintptr_t>(bytes.data()) % 16) % 16;
        const std::vector<float> importance(k, 1.0f);
        ggml_quantize_chunk(type, x.data(), at, 0, rows, k, importance.data());
        values.resize(x.size());
        ggml_get_type_traits(type)->to_float(at, values.data(), static_cast<int64_t>(x.size()));
    }
    ggml_type type;
    int rows, k;
    size_t row_bytes;
    std::vector<unsigned char> bytes;
    unsigned char * at;
    std::vector<float> values;
};

std::vector<float> inputs(int k, int n, int seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(k) * n);
    for (float & v : x) {
        v = normal(random);
    }
    x[k / 2] = 300.0f;  // hidden states have such elements
    return x;
}

struct options {
    int units_per_part = 2;
    int activation = few_rows::NONE;
    const float * bias = nullptr;
    const float * gate = nullptr;
    const float * residuals[2] = {};
};

template <typename A, typename B>
void run_kernel(const product & p, int row_blocks, int n_tiles) {
    const int units = (p.k + few_rows::UNIT - 1) / few_rows::UNIT;
    const emulated::dim grid = {row_blocks, (units + p.units_per_part - 1) / p.units_per_part,
                                (n_tiles + 3) / 4};
    const int tiles = std::min(n_tiles, 4);
    const size_t shared = few_rows::product_shared_memory(few_rows::WARPS * A::RING,
                                                          few_rows::WARPS * B::RING, tiles);
    std::vector<float> partials(few_rows::product_scratch(row_blocks * grid.z, grid.y, tiles) + 4,
                                NAN);
    std::vector<unsigned> counters(row_blocks * grid.z, 0);
    product q = p;
    q.partials =
        partials.data() + (16 - reinterpret_cast<uintptr_t>(partials.data()) % 16) % 16 / 4;
    q.counters = counters.data();
    emulated::launch(grid, few_rows::BLOCK_THREADS, shared, [&] {
        if (tiles == 1) {
            few_rows::multiply<A, B, 1>(q);
        } else if (tiles == 2) {
            few_rows::multiply<A, B, 2>(q);
        } else {
            few_rows::multiply<A, B, 4>(q);
        }
    });
    for (const unsigned c : counters) {
        check::equal(c, 0u, "a counter is left");
    }
}

template <typename A, typename B = A>
std::vector<std::vector<float>> multiplied(const std::vector<const weights *> & matrices,
                                           const std::vector<float> & x, int n,
                                           const options & o = {}) {
    const int k = matrices[0]->k, units = (k + few_rows::UNIT - 1) / few_rows::UNIT;
    const int n_tiles = n <= 8 ? 1 : n <= 16 ? 2 : n <= 32 ? 4 : 8;
    std::vector<few_rows::floats4> converted(units * n_tiles * few_rows::TILE_BYTES / 16);
    few_rows::conversion c = {};
    std::vector<few_rows::floats4> aligned(x.size() / 4 + 1);
    std::memcpy(aligned.data(), x.data(), x.size() * 4);
    c.x = reinterpret_cast<float *>(aligned.data());
    c.stride = k;
    c.out = reinterpret_cast<unsigned char *>(converted.data());
    c.k = k;
    c.n_columns = n;
    c.n_tiles = n_tiles;
    emulated::launch({units * n_tiles}, few_rows::BLOCK_THREADS, 0, [&] { convert_input(c); });

    product p = {};
    std::vector<std::vector<float>> out;
    int row_blocks = 0;
    for (const weights * w : matrices) {
        few_rows::matrix & m = p.matrices[out.size()];
        out.emplace_back(static_cast<size_t>(w->rows) * n, NAN);
        m.weights = w->at;
        m.row_bytes = w->row_bytes;
        m.out_stride = w->rows;
        m.rows = w->rows;
        m.type = w->type == matrices[0]->type ? 0 : 1;
        m.bias = o.bias;
        m.gate = o.gate;
        for (int r = 0; r < 2; r++) {
            m.residuals[r] = o.residuals[r];
            m.residual_strides[r] = w->rows;
        }
        row_blocks += (w->rows + few_rows::BLOCK_ROWS - 1) / few_rows::BLOCK_ROWS;
    }
    if (o.activation) {
        row_blocks =
            (matrices[0]->rows + few_rows::BLOCK_ROWS / 2 - 1) / (few_rows::BLOCK_ROWS / 2);
    }
    for (size_t i = 0; i < out.size(); i++) {
        p.matrices[i].out = out[i].data();
    }
    p.x = c.out;
    p.n_matrices = static_cast<int>(matrices.size());
    p.k = k;
    p.units_per_part = o.units_per_part;
    p.n_columns = n;
    p.activation = o.activation;
    p.alpha = 1.702f;
    p.limit = 7.0f;
    run_kernel<A, B>(p, row_blocks, n_tiles);
    return out;
}

std::vector<double> reference(const weights & w, const std::vector<float> & x, int n) {
    std::vector<double> y(static_cast<size_t>(w.rows) * n, 0.0);
    for (int c = 0; c < n; c++) {
        for (int r = 0; r < w.rows; r++) {
            double sum = 0.0;
            for (int i = 0; i < w.k; i++) {
                sum += static_cast<double>(w.values[static_cast<size_t>(r) * w.k + i]) *
                       x[c * w.k + i];
            }
            y[static_cast<size_t>(c) * w.rows + r] = sum;
        }
    }
    return y;
}

// Distance over length, column by column.
double error_of(const std::vector<float> & found, const std::vector<double> & expected) {
    double off = 0.0, size = 0.0;
    for (size_t i = 0; i < found.size(); i++) {
        off += std::pow(found[i] - expected[i], 2);
        size += std::pow(expected[i], 2);
    }
    return std::sqrt(off / size);
}

// Halves keep eleven bits of an input: 2^-12 of it in the mean, and less in a sum.
constexpr double CLOSE = 4e-4;

// Columns of one to eight tiles, full and not. How they are laid out is the same for all types, so
// only some types are tried with all of them.
const std::vector<int> ALL_COLUMNS = {64, 33, 17, 16, 9, 8, 5, 1}, SOME_COLUMNS = {17, 9, 5};

template <typename T>
void product_of(ggml_type type, int rows, int k, float size = 0.05f,
                const std::vector<int> & columns = SOME_COLUMNS) {
    const weights w(type, rows, k, 1, size);
    const std::string name =
        ggml_type_name(type) + (" " + std::to_string(rows)) + " x " + std::to_string(k);
    const std::vector<float> all = inputs(k, columns[0], 2);
    const std::vector<double> expected = reference(w, all, columns[0]);
    std::vector<float> widest;
    for (const int n : columns) {
        const std::vector<float> x(all.begin(), all.begin() + static_cast<ptrdiff_t>(k) * n);
        const std::vector<float> y = multiplied<T>({&w}, x, n)[0];
        const double off = error_of(y, {expected.begin(), expected.begin() + y.size()});
        check::that(off < CLOSE,
                    name + ", " + std::to_string(n) + " columns: off by " + std::to_string(off));
        if (widest.empty()) {
            widest = y;
        }
        check::that(std::equal(y.begin(), y.end(), widest.begin()),
                    name + ": other bits beside " + std::to_string(n - 1) + " columns");
    }
}

// Blocks whose scale leaves the entries of a table, eight at a time in their first group.
void fill_grids() {
    float values[256];
    unsigned char block[110] = {};
    for (unsigned entry = 0; entry < 512; entry++) {
        const auto bytes = [&] {
            unsigned packed = 0;
            for (int i = 0; i < 4; i++) {
                packed |= static_cast<unsigned>(values[i]) << 8 * i;
            }
            return packed;
        };
        std::fill_n(block, sizeof(block), 0);
        block[1] = 0x44;  // 4
        block[2] = entry & 255;
        if (entry < 256) {
            ggml_get_type_traits(GGML_TYPE_IQ3_XXS)->to_float(block, values, 256);
            iq3_xxs_grid[entry] = bytes();
        }
        block[1] = 0x3c;  // 1
        block[66] = entry >> 8;
        ggml_get_type_traits(GGML_TYPE_IQ3_S)->to_float(block, values, 256);
        iq3_s_grid[entry] = bytes();
    }
}

void products_are_right_and_the_same_beside_any_columns() {
    using namespace few_rows;
    product_of<Q4_K>(GGML_TYPE_Q4_K, 150, 768, 0.05f, ALL_COLUMNS);
    product_of<Q5_K>(GGML_TYPE_Q5_K, 20, 512);
    product_of<Q6_K_U>(GGML_TYPE_Q6_K, 20, 768);
    product_of<Q3_K_U>(GGML_TYPE_Q3_K, 20, 512);
    product_of<Q2_K_U>(GGML_TYPE_Q2_K, 20, 512);
    product_of<IQ4_XS_U>(GGML_TYPE_IQ4_XS, 20, 512);
    product_of<Q8_0>(GGML_TYPE_Q8_0, 20, 512);
    product_of<Q8_0_U>(GGML_TYPE_Q8_0, 20, 576);
    product_of<Q4_0>(GGML_TYPE_Q4_0, 20, 512);
    product_of<Q4_0_U>(GGML_TYPE_Q4_0, 20, 288);
    product_of<Q4_1>(GGML_TYPE_Q4_1, 20, 512);
    product_of<Q4_1_U>(GGML_TYPE_Q4_1, 20, 576);
    product_of<Q5_0>(GGML_TYPE_Q5_0, 20, 512);
    product_of<Q5_1>(GGML_TYPE_Q5_1, 20, 512);
    product_of<Q5_1_U>(GGML_TYPE_Q5_1, 20, 320);
    product_of<IQ4_NL>(GGML_TYPE_IQ4_NL, 20, 512);
    product_of<MXFP4_U>(GGML_TYPE_MXFP4, 20, 288);
    product_of<F16>(GGML_TYPE_F16, 150, 768, 0.05f, ALL_COLUMNS);
    product_of<F16>(GGML_TYPE_F16, 20, 288);
    product_of<BF16>(GGML_TYPE_BF16, 150, 768, 0.05f, ALL_COLUMNS);
    product_of<BF16>(GGML_TYPE_BF16, 20, 288);
    product_of<BF16>(GGML_TYPE_BF16, 20, 512, 1e20f);  // far beyond any half
    product_of<BF16>(GGML_TYPE_BF16, 20, 512, 1e-20f);
    fill_grids();
    product_of<IQ3_XXS_U>(GGML_TYPE_IQ3_XXS, 20, 512);
    product_of<IQ3_S_U>(GGML_TYPE_IQ3_S, 20, 512);
}

void three_matrices_in_one_launch() {
    const weights q(GGML_TYPE_Q4_K, 130, 512, 1), k(GGML_TYPE_Q4_K, 40, 512, 2),
        v(GGML_TYPE_Q6_K, 40, 512, 3);
    const std::vector<float> x = inputs(512, 5, 4);
    const auto y = multiplied<few_rows::Q4_K, few_rows::Q6_K_U>({&q, &k, &v}, x, 5);
    check::that(error_of(y[0], reference(q, x, 5)) < CLOSE, "q");
    check::that(error_of(y[1], reference(k, x, 5)) < CLOSE, "k");
    check::that(error_of(y[2], reference(v, x, 5)) < CLOSE, "v");
    check::equal(y[0], multiplied<few_rows::Q4_K>({&q}, x, 5)[0], "q alone has other bits");
    const weights floats(GGML_TYPE_BF16, 40, 512, 3);
    const auto z = multiplied<few_rows::Q4_K, few_rows::BF16>({&q, &floats}, x, 5);
    check::equal(z[0], y[0], "q beside floats has other bits");
    check::that(error_of(z[1], reference(floats, x, 5)) < CLOSE, "floats beside blocks");
}

double activated(int kind, double gate, double up) {
    if (kind == few_rows::SWIGLU) {
        return gate / (1 + std::exp(-gate)) * up;
    }
    if (kind == few_rows::GEGLU) {
        return 0.5 * gate *
               (1 + std::tanh(0.7978845608028654 * gate * (1 + 0.044715 * gate * gate))) * up;
    }
    const double u = std::clamp(up, -7.0, 7.0), g = std::min(gate, 7.0);
    return g / (1 + std::exp(-1.702 * g)) * (1 + u);
}

void gate_and_up_with_their_activation() {
    const weights gate(GGML_TYPE_Q4_K, 100, 512, 1), up(GGML_TYPE_Q6_K, 100, 512, 2);
    const std::vector<float> x = inputs(512, 9, 4);
    const std::vector<double> a = reference(gate, x, 9), b = reference(up, x, 9);
    for (const int kind : {few_rows::SWIGLU, few_rows::GEGLU, few_rows::SWIGLU_OAI}) {
        options o;
        o.activation = kind;
        std::vector<double> expected(a.size());
        for (size_t i = 0; i < a.size(); i++) {
            expected[i] = activated(kind, a[i], b[i]);
        }
        const auto y = multiplied<few_rows::Q4_K, few_rows::Q6_K_U>({&gate, &up}, x, 9, o);
        check::that(error_of(y[0], expected) < 2 * CLOSE, "activation " + std::to_string(kind));
    }
}

void bias_gate_and_residuals_are_applied() {
    const weights w(GGML_TYPE_Q8_0, 30, 256, 1);
    const std::vector<float> x = inputs(256, 3, 4), residual = inputs(30, 3, 5),
                             bias = inputs(30, 1, 6), other = inputs(30, 3, 7),
                             gate = {-1.5f, 0.25f, 2.0f};
    const std::vector<double> product = reference(w, x, 3);
    for (const bool is_gated : {false, true}) {
        std::vector<double> expected = product;
        for (size_t i = 0; i < expected.size(); i++) {
            expected[i] += bias[i % 30];
            expected[i] *= is_gated ? 1.0 / (1.0 + std::exp(-gate[i / 30])) : 1.0;
            expected[i] += residual[i] + (is_gated ? other[i] : 0.0);
        }
        options o;
        o.bias = bias.data();
        o.gate = is_gated ? gate.data() : nullptr;
        o.residuals[0] = residual.data();
        o.residuals[1] = is_gated ? other.data() : nullptr;
        check::that(error_of(multiplied<few_rows::Q8_0>({&w}, x, 3, o)[0], expected) < CLOSE,
                    is_gated ? "with a gate" : "sum");
    }
}

// The norm before a product, with its input: the same product as of a norm in float64.
void an_input_is_normalized_and_converted() {
    const int k = 544, n = 9, n_tiles = 2, units = 3;
    const std::vector<float> x = inputs(k, n, 4), weight = inputs(k, 1, 5);
    std::vector<few_rows::floats4> from(x.size() / 4 + 1), scale(k / 4);
    std::memcpy(from.data(), x.data(), x.size() * 4);
    std::memcpy(scale.data(), weight.data(), weight.size() * 4);
    std::vector<few_rows::floats4> normal(x.size() / 4 + 1),
        converted(units * n_tiles * few_rows::TILE_BYTES / 16), expected(converted.size());
    few_rows::normalization norm = {};
    norm.input = {reinterpret_cast<float *>(from.data()),
                  static_cast<unsigned>(k),
                  reinterpret_cast<unsigned char *>(converted.data()),
                  k,
                  n,
                  n_tiles};
    norm.weight = reinterpret_cast<float *>(scale.data());
    norm.normal = reinterpret_cast<float *>(normal.data());
    norm.normal_stride = k;
    norm.epsilon = 1e-6f;
    emulated::launch({n_tiles * 8}, few_rows::BLOCK_THREADS, 32, [&] { normalize_input(norm); });
    const auto * y = norm.normal;
    for (int c = 0; c < n; c++) {
        double sum = 0.0;
        for (int i = 0; i < k; i++) {
            sum += std::pow(static_cast<double>(x[c * k + i]), 2);
        }
        for (int i = 0; i < k; i++) {
            const double wanted = x[c * k + i] / std::sqrt(sum / k + 1e-6) * weight[i];
            check::that(std::abs(y[c * k + i] - wanted) <= 1e-5 * std::abs(wanted), "normal");
        }
    }
    few_rows::conversion c = norm.input;
    c.x = norm.normal;
    c.out = reinterpret_cast<unsigned char *>(expected.data());
    emulated::launch({units * n_tiles}, few_rows::BLOCK_THREADS, 0, [&] { convert_input(c); });
    check::that(std::memcmp(expected.data(), converted.data(), expected.size() * 16) == 0,
                "other halves than those of a conversion by itself");
}

// A column with an infinity or a NaN has no finite result, as ggml's; its neighbours are what they
// were.
void only_the_column_of_a_nan_is_lost() {
    const weights w(GGML_TYPE_Q4_K, 30, 512, 1);
    std::vector<float> x = inputs(512, 3, 4);
    const std::vector<float> before = multiplied<few_rows::Q4_K>({&w}, x, 3)[0];
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
        x[512 + 77] = bad;
        const std::vector<float> y = multiplied<few_rows::Q4_K>({&w}, x, 3)[0];
        for (int r = 0; r < 30; r++) {
            check::that(!std::isfinite(y[30 + r]), "a finite sum with " + std::to_string(bad));
            check::that(y[r] == before[r] && y[60 + r] == before[60 + r], "a neighbour changed");
        }
    }
}

// Halves alone would overflow at 65,504 and lose what is below 6e-8.
void inputs_of_any_size_are_multiplied() {
    const weights w(GGML_TYPE_Q6_K, 30, 512, 1);
    for (const float size : {1e30f, 1e6f, 1e-10f, 1e-36f}) {
        std::vector<float> x = inputs(512, 2, 4);
        for (float & v : x) {
            v *= size;
        }
        const double off =
            error_of(multiplied<few_rows::Q6_K_U>({&w}, x, 2)[0], reference(w, x, 2));
        check::that(off < CLOSE,
                    "inputs of " + std::to_string(size) + ": off by " + std::to_string(off));
    }
}

// Each row chose some experts; a row has the same bits beside any others, also where many chose the
// same expert.
template <typename T>
void experts_of(ggml_type type, int rows, int k, int n_experts, int n_used, bool one_input,
                int activation = few_rows::NONE) {
    const weights all(type, rows * n_experts, k, 1), ups(type, rows * n_experts, k, 4);
    const std::vector<float> bias = inputs(rows, n_experts, 5),
                             up_bias = inputs(rows, n_experts, 6);
    const int most = 24, n_inputs = one_input ? 1 : n_used;
    const std::vector<float> x = inputs(k, most * n_inputs, 2);
    std::vector<few_rows::floats4> aligned(x.size() / 4 + 1);
    std::memcpy(aligned.data(), x.data(), x.size() * 4);
    std::vector<int> ids;
    std::mt19937 random(3);
    for (int row = 0; row < most; row++) {
        std::vector<int> each(n_experts);
        for (int e = 0; e < n_experts; e++) {
            each[e] = e;
        }
        std::shuffle(each.begin() + (row % 2), each.end(),
                     random);  // every other row takes the first
        ids.insert(ids.end(), each.begin(), each.begin() + n_used);
    }
    std::vector<float> widest;
    for (const int n : {most, 9, 1}) {
        const int units = (k + few_rows::UNIT - 1) / few_rows::UNIT;
        few_rows::conversion c = {};
        c.x = reinterpret_cast<float *>(aligned.data());
        c.stride = c.k = k;
        c.n_columns = n * n_inputs;
        c.n_tiles = (c.n_columns + 7) / 8;
        std::vector<few_rows::floats4> converted(units * c.n_tiles * few_rows::TILE_BYTES / 16);
        c.out = reinterpret_cast<unsigned char *>(converted.data());
        const int items = few_rows::most_items(n * n_used, n_experts);
        std::vector<few_rows::expert_item> order(items, {-1, -1, {}});
        const few_rows::chosen_input chosen = {
            {ids.data(), static_cast<unsigned>(n_used), order.data(), n, n_used, n_experts}, c};
        emulated::launch({1 + units * c.n_tiles}, few_rows::BLOCK_THREADS, few_rows::CHOICE_SHARED,
                         [&] { order_choice(chosen); });

        few_rows::expert_product e = {};
        product & p = e.base;
        std::vector<float> out(static_cast<size_t>(n) * n_used * rows, NAN);
        p.matrices[0].weights = all.at;
        p.matrices[0].row_bytes = all.row_bytes;
        p.matrices[0].rows = rows;
        p.matrices[0].out = out.data();
        p.matrices[0].out_stride = rows;
        p.x = c.out;
        p.k = k;
        p.n_matrices = 1;
        p.units_per_part = 1;
        if (activation != few_rows::NONE) {
            p.activation = activation;
            p.alpha = 1.702f;
            p.limit = 7.0f;
            p.n_matrices = 2;
            p.matrices[0].bias = bias.data();
            p.matrices[1] = p.matrices[0];
            p.matrices[1].weights = ups.at;
            p.matrices[1].bias = up_bias.data();
            e.expert_bias = rows;
        }
        e.items = order.data();
        e.expert_bytes = all.row_bytes * rows;
        e.out_row = static_cast<size_t>(rows) * n_used;
        e.n_used = n_used;
        e.n_inputs = n_inputs;
        e.n_tiles = c.n_tiles;
        const int of_block =
            activation != few_rows::NONE ? few_rows::BLOCK_ROWS / 2 : few_rows::BLOCK_ROWS;
        const int row_blocks = (rows + of_block - 1) / of_block;
        std::vector<few_rows::floats4> partials(
            few_rows::product_scratch(row_blocks * items, units, 1) / 4 + 1);
        std::vector<unsigned> counters(row_blocks * items, 0);
        p.partials = reinterpret_cast<float *>(partials.data());
        p.counters = counters.data();
        const size_t shared = few_rows::product_shared_memory(few_rows::WARPS * T::RING, 0, 1);
        emulated::launch({row_blocks, units, items}, few_rows::BLOCK_THREADS, shared,
                         [&] { few_rows::multiply_experts<T>(e); });
        for (int pair = 0; pair < n * n_used; pair++) {
            const float * input =
                x.data() + static_cast<size_t>(one_input ? pair / n_used : pair) * k;
            const auto product = [&](const weights & w, int r) {
                double sum = 0.0;
                for (int i = 0; i < k; i++) {
                    sum += static_cast<double>(w.values[static_cast<size_t>(r) * k + i]) * input[i];
                }
                return sum;
            };
            double off = 0.0, size = 0.0;
            for (int r = 0; r < rows; r++) {
                const int row = ids[pair] * rows + r;
                double sum = product(all, row);
                if (activation != few_rows::NONE) {
                    sum = activated(activation, sum + bias[row], product(ups, row) + up_bias[row]);
                }
                off += std::pow(out[static_cast<size_t>(pair) * rows + r] - sum, 2);
                size += sum * sum;
            }
            check::that(std::sqrt(off / size) < 2 * CLOSE,
                        "pair " + std::to_string(pair) + " of " + std::to_string(n) +
                            " rows is off by " + std::to_string(std::sqrt(off / size)));
        }
        widest = widest.empty() ? out : widest;
        check::that(std::equal(out.begin(), out.end(), widest.begin()),
                    "other bits beside other rows");
        for (const unsigned counter : counters) {
            check::equal(counter, 0u, "a counter is left");
        }
    }
}

void rows_are_multiplied_by_the_experts_that_they_chose() {
    experts_of<few_rows::Q4_K>(GGML_TYPE_Q4_K, 130, 512, 12, 3, true);
    experts_of<few_rows::Q6_K_U>(GGML_TYPE_Q6_K, 20, 256, 5, 2, false);
    experts_of<few_rows::BF16>(GGML_TYPE_BF16, 20, 288, 5, 2, true);
    experts_of<few_rows::MXFP4_U>(GGML_TYPE_MXFP4, 20, 320, 7, 4, true);
}

void gate_and_up_of_experts_with_their_biases_and_activation() {
    experts_of<few_rows::Q4_K>(GGML_TYPE_Q4_K, 70, 512, 6, 3, true, few_rows::SWIGLU);
    experts_of<few_rows::MXFP4_U>(GGML_TYPE_MXFP4, 70, 320, 5, 4, true, few_rows::SWIGLU_OAI);
}

void routers_are_multiplied_as_floats() {
    const int k = 1156, rows = 11, most = 19;
    const std::vector<float> w = inputs(k, rows, 1), x = inputs(k, most, 2);
    std::vector<few_rows::floats4> weights(w.size() / 4), columns(x.size() / 4);
    std::memcpy(weights.data(), w.data(), w.size() * 4);
    std::memcpy(columns.data(), x.data(), x.size() * 4);
    std::vector<float> widest;
    for (const int n : {most, 8, 1}) {
        std::vector<float> out(static_cast<size_t>(rows) * n, NAN);
        // As two matrices, of nine rows and two.
        const auto * w0 = reinterpret_cast<float *>(weights.data());
        few_rows::plain_product p = {
            {{w0, k, out.data(), rows, 9}, {w0 + 9 * k, k, out.data() + 9, rows, rows - 9}},
            reinterpret_cast<float *>(columns.data()),
            k,
            k,
            n};
        emulated::launch({(rows + few_rows::PLAIN_ROWS - 1) / few_rows::PLAIN_ROWS, (n + 7) / 8},
                         few_rows::BLOCK_THREADS, few_rows::PLAIN_SHARED,
                         [&] { plain_product(p); });
        for (size_t i = 0; i < out.size(); i++) {
            double sum = 0.0, size = 0.0;
            for (int at = 0; at < k; at++) {
                const double term =
                    static_cast<double>(w[i % rows * k + at]) * x[i / rows * k + at];
                sum += term;
                size += std::abs(term);
            }
            check::that(std::abs(out[i] - sum) <= 1e-6 * size, "a product of floats");
        }
        widest = widest.empty() ? out : widest;
        check::that(std::equal(out.begin(), out.end(), widest.begin()),
                    "other bits beside other columns");
    }
}

const check::tests few_rows_tests = {
    {"products of few rows are right, and the same beside any columns",
     products_are_right_and_the_same_beside_any_columns},
    {"three matrices in one launch", three_matrices_in_one_launch},
    {"gate and up with their activation", gate_and_up_with_their_activation},
    {"bias, gate and residuals are applied", bias_gate_and_residuals_are_applied},
    {"an input is normalized and converted", an_input_is_normalized_and_converted},
    {"only the column of a NaN is lost", only_the_column_of_a_nan_is_lost},
    {"inputs of any size are multiplied", inputs_of_any_size_are_multiplied},
    {"rows are multiplied by the experts that they chose",
     rows_are_multiplied_by_the_experts_that_they_chose},
    {"gate and up of experts with their biases and activation",
     gate_and_up_of_experts_with_their_biases_and_activation},
    {"routers are multiplied as floats", routers_are_multiplied_as_floats},
};

}  // namespace
