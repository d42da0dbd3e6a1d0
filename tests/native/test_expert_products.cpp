// Products with experts of MXFP4 in RAM, by kernels of our own in ggml's own graphs.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "backend.h"
#include "check.h"
#include "expert_products.h"
#include "expert_tile.h"

namespace {

constexpr int64_t k = 96, n_outputs = 80, n_experts = 6, n_used = 3, most_rows = 70;

// Weights of experts in host memory, and inputs for up to `most_rows` rows.
struct experts {
    ggml_backend_ptr cpu =
        dflash::open_backend(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), 3);
    ggml_context_ptr context = dflash::new_tensors(1);
    ggml_tensor * w = ggml_new_tensor_3d(context.get(), GGML_TYPE_MXFP4, k, n_outputs, n_experts);
    ggml_backend_buffer_ptr buffer{ggml_backend_alloc_ctx_tensors(context.get(), cpu.get())};
    std::vector<float> weights, inputs;
    std::vector<int32_t> ids;

    experts() : weights(ggml_nelements(w)), inputs(k * n_used * most_rows) {
        std::mt19937 random(7);
        std::normal_distribution<float> normal;
        std::generate(weights.begin(), weights.end(), [&] { return normal(random); });
        std::generate(inputs.begin(), inputs.end(), [&] { return normal(random); });
        std::fill_n(weights.begin(), 32, 0.0f);  // a block without a scale
        std::fill_n(inputs.begin() + 32, 32, 0.0f);
        ggml_quantize_chunk(w->type, weights.data(), w->data, 0, n_outputs * n_experts, k, nullptr);
        ggml_get_type_traits(w->type)->to_float(w->data, weights.data(), ggml_nelements(w));
        for (int64_t row = 0; row < most_rows; row++) {
            // The last expert is never chosen, and the first by nearly all: more than a tile takes.
            const auto other = static_cast<int32_t>(random() % 3);
            ids.insert(ids.end(), {row % 9 == 8 ? 4 : 0, 1 + other, 1 + (other + 1) % 3});
        }
    }

    // Results of the first rows; each slot has an input of its own if there are as many.
    std::vector<float> products(int64_t n_rows, int64_t n_inputs) const {
        const ggml_context_ptr nodes = dflash::new_nodes(8);
        ggml_tensor * x = ggml_new_tensor_3d(nodes.get(), GGML_TYPE_F32, k, n_inputs, n_rows);
        ggml_tensor * chosen = ggml_new_tensor_2d(nodes.get(), GGML_TYPE_I32, n_used, n_rows);
        ggml_tensor * y = ggml_mul_mat_id(nodes.get(), w, x, chosen);
        ggml_cgraph * graph = ggml_new_graph_custom(nodes.get(), 8, false);
        ggml_build_forward_expand(graph, y);
        const ggml_backend_buffer_ptr room(ggml_backend_alloc_ctx_tensors(nodes.get(), cpu.get()));
        ggml_backend_tensor_set(x, inputs.data(), 0, ggml_nbytes(x));
        ggml_backend_tensor_set(chosen, ids.data(), 0, ggml_nbytes(chosen));
        dflash::start_graph(cpu.get(), graph, "to multiply");
        std::vector<float> found(ggml_nelements(y));
        ggml_backend_tensor_get(y, found.data(), 0, ggml_nbytes(y));
        return found;
    }

    // The distance of results from those in f64, over their length.
    double error(const std::vector<float> & found, int64_t n_inputs) const {
        double off = 0.0, size = 0.0;
        for (size_t i = 0; i < found.size(); i++) {
            const size_t slot = i / n_outputs, row = slot / n_used;
            const float * x = inputs.data() + (row * n_inputs + slot % n_used % n_inputs) * k;
            const float * of_output = weights.data() + (ids[slot] * n_outputs + i % n_outputs) * k;
            double expected = 0.0;
            for (int64_t j = 0; j < k; j++) {
                expected += static_cast<double>(of_output[j]) * x[j];
            }
            off += std::pow(found[i] - expected, 2);
            size += expected * expected;
        }
        return std::sqrt(off / size);
    }
};

void results_are_right_and_the_same_beside_any_rows() {
    const experts all;
    const std::vector<float> by_ggml = all.products(5, 1);
    check::that(all.error(by_ggml, 1) < 0.01, "ggml reads the same weights");
    dflash::speed_up_experts();
    if (dflash::expert_tile::for_this_processor() == nullptr) {
        check::equal(dflash::expert_kernels(), std::string(), "they are for some processors");
        return;
    }
    check::equal(dflash::rows_a_thread(GGML_TYPE_Q8_0), 0, "another type is ggml's");
    check::that(dflash::rows_a_thread(GGML_TYPE_MXFP4) > 0, "they run here");
    for (const int64_t n_inputs : {int64_t{1}, n_used}) {
        std::vector<float> widest;
        for (const int64_t n_rows : {most_rows, int64_t{33}, int64_t{8}, int64_t{2}, int64_t{1}}) {
            const long before = dflash::n_expert_products();
            const std::vector<float> found = all.products(n_rows, n_inputs);
            check::equal(dflash::n_expert_products(), before + 1, "ours did it");
            if (widest.empty()) {
                const double error = all.error(found, n_inputs);
                check::that(error < 0.01, "rounding to 8 bits is " + std::to_string(error));
                widest = found;
            }
            check::that(std::equal(found.begin(), found.end(), widest.begin()),
                        "a row has other bits beside " + std::to_string(n_rows - 1) + " more");
        }
    }
}

void kernels_of_all_processors_agree() {
    const experts all;
    const dflash::expert_tile::kernels * best = dflash::expert_tile::for_this_processor();
    const dflash::expert_tile::kernels * plain = dflash::expert_tile::named("AVX2");
    check::that(dflash::expert_tile::named("AltiVec") == nullptr, "unknown kernels are not there");
    if (best == nullptr) {
        return;
    }
    constexpr int n = 11, n_blocks = k / 32;
    std::vector<std::vector<float>> found;
    for (const auto * kernels : {best, plain}) {
        std::vector<char> memory(dflash::expert_tile::operand::bytes(n * n_blocks));
        const auto x = dflash::expert_tile::operand::at(memory.data(), n * n_blocks, n_blocks);
        for (int i = 0; i < n * n_blocks; i++) {
            kernels->round(all.inputs.data() + i * 32, x, i);
        }
        std::vector<float> & results = found.emplace_back(n * 16);
        std::vector<int32_t> rows;
        std::vector<float *> outs;
        for (int i = 0; i < n; i++) {
            rows.push_back(n - 1 - i);
            outs.push_back(results.data() + i * 16);
        }
        kernels->multiply(static_cast<const unsigned char *>(all.w->data), x, rows.data(), n,
                          outs.data());
    }
    check::that(found[0] == found[1], "AVX-512 and AVX2 give the same bits");
}

const check::tests registered{
    {"experts in RAM: right, and the same bits beside any rows",
     results_are_right_and_the_same_beside_any_rows},
    {"experts in RAM: all processors' kernels agree", kernels_of_all_processors_agree},
};

}  // namespace
