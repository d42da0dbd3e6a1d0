#include "expert_products.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <vector>

#include "backend.h"
#include "expert_tile.h"
#include "private_abi.h"

namespace dflash {

namespace {

using expert_tile::operand;
using private_abi::cpu_share;

// Tiles that a thread takes at a time: 100 KB of gpt-oss, which stay in its cache for all rows.
constexpr int64_t n_taken = 4;

std::atomic<long> n_done{0};

// The memory that all threads share in a product, and its sizes.
struct plan {
    int64_t n_tiles, n_experts, n_slots, n_inputs;
    size_t n_blocks, n_of_all;

    explicit plan(const ggml_tensor & op)
        : n_tiles(op.src[0]->ne[1] / expert_tile::n_outputs),
          n_experts(op.src[0]->ne[2]),
          n_slots(op.src[2]->ne[0] * op.src[2]->ne[1]),
          n_inputs(op.src[1]->ne[1]),
          n_blocks(op.src[0]->ne[0] / expert_tile::block_size),
          n_of_all(n_blocks * n_inputs * op.src[1]->ne[2]) {}

    size_t size() const {
        return operand::bytes(n_of_all) + (2 * n_experts + 2 + n_slots) * sizeof(int32_t);
    }
    operand inputs(void * memory) const { return operand::at(memory, n_of_all, n_blocks); }
    // The number of experts that are chosen, and which; where the slots of each begin; the slots.
    int32_t * chosen(void * memory) const {
        return reinterpret_cast<int32_t *>(static_cast<char *>(memory) + operand::bytes(n_of_all));
    }
    int32_t * begins(void * memory) const { return chosen(memory) + 1 + n_experts; }
    int32_t * slots(void * memory) const { return begins(memory) + n_experts + 1; }
};

// Sorts the slots of a pass by expert.
void sort_slots(const plan & p, const ggml_tensor & ids, void * memory) {
    int32_t *chosen = p.chosen(memory), *begins = p.begins(memory), *slots = p.slots(memory);
    const auto each = [&](const auto & use) {
        for (int64_t slot = 0; slot < p.n_slots; slot++) {
            int32_t expert;
            std::memcpy(&expert,
                        static_cast<const char *>(ids.data) + slot % ids.ne[0] * ids.nb[0] +
                            slot / ids.ne[0] * ids.nb[1],
                        sizeof expert);
            if (expert >= 0 && expert < p.n_experts) {
                use(expert, static_cast<int32_t>(slot));
            }
        }
    };
    std::fill_n(begins, p.n_experts + 1, 0);
    each([&](int32_t expert, int32_t) { begins[expert + 1]++; });
    chosen[0] = 0;
    for (int64_t e = 0; e < p.n_experts; e++) {
        if (begins[e + 1] > 0) {
            chosen[++chosen[0]] = static_cast<int32_t>(e);
        }
        begins[e + 1] += begins[e];
    }
    // Each begin moves to its end, which is the next one's begin, and back.
    each([&](int32_t expert, int32_t slot) { slots[begins[expert]++] = slot; });
    std::copy_backward(begins, begins + p.n_experts, begins + p.n_experts + 1);
    begins[0] = 0;
}

class product : public private_abi::cpu_operation {
  public:
    explicit product(const expert_tile::kernels & k) : kernels_(k) {}

    bool memory_size(int, const ggml_tensor * op, size_t & size) override {
        size = plan(*op).size();
        return true;
    }

    bool compute(cpu_share * share, ggml_tensor * op) override {
        const plan p(*op);
        const operand x = p.inputs(share->memory);
        if (share->thread == 0) {
            sort_slots(p, *op->src[2], share->memory);
            start_count(*share, share->n_threads);
            n_done++;
        }
        round_inputs(p, *op->src[1], x, *share);
        wait_for_all(*share);
        const int32_t * chosen = p.chosen(share->memory);
        const int64_t n_parts = (p.n_tiles + n_taken - 1) / n_taken;
        for (int64_t at = share->thread; at < chosen[0] * n_parts; at = count_one(*share)) {
            const int64_t first = at % n_parts * n_taken;
            multiply(p, x, *op, share->memory, chosen[1 + at / n_parts], first,
                     std::min(first + n_taken, p.n_tiles));
        }
        return true;
    }

  private:
    void round_inputs(const plan & p, const ggml_tensor & from, const operand & to,
                      const cpu_share & share) const {
        const size_t end = p.n_of_all * (share.thread + 1) / share.n_threads;
        for (size_t at = p.n_of_all * share.thread / share.n_threads; at < end; at++) {
            const size_t row = at / p.n_blocks;
            const char * x = static_cast<const char *>(from.data) + row % p.n_inputs * from.nb[1] +
                             row / p.n_inputs * from.nb[2];
            kernels_.round(
                reinterpret_cast<const float *>(x) + at % p.n_blocks * expert_tile::block_size, to,
                at);
        }
    }

    // Some tiles of an expert, for all slots that chose it.
    void multiply(const plan & p, const operand & x, const ggml_tensor & op, void * memory,
                  int32_t expert, int64_t first, int64_t end) const {
        const ggml_tensor & w = *op.src[0];
        const int64_t n_used = op.src[2]->ne[0];
        const auto * weights = static_cast<const unsigned char *>(w.data) + expert * w.nb[2];
        const int32_t *slot = p.slots(memory) + p.begins(memory)[expert],
                      *last = p.slots(memory) + p.begins(memory)[expert + 1];
        while (slot < last) {
            int32_t rows[expert_tile::most_rows];
            float *results[expert_tile::most_rows], *outs[expert_tile::most_rows];
            int n = 0;
            for (; slot < last && n < expert_tile::most_rows; slot++, n++) {
                const int64_t row = *slot / n_used, of_row = *slot % n_used;
                rows[n] = static_cast<int32_t>(row * p.n_inputs + of_row % p.n_inputs);
                results[n] = reinterpret_cast<float *>(static_cast<char *>(op.data) +
                                                       of_row * op.nb[1] + row * op.nb[2]);
            }
            for (int64_t tile = first; tile < end; tile++) {
                const int64_t output = tile * expert_tile::n_outputs;
                std::transform(results, results + n, outs, [&](float * r) { return r + output; });
                kernels_.multiply(weights + output * w.nb[1], x, rows, n, outs);
            }
        }
    }

    const expert_tile::kernels & kernels_;
};

class products : public private_abi::cpu_operations {
  public:
    explicit products(const expert_tile::kernels & k) : product_(k) {}

    bool supports(ggml_backend_dev_t, const ggml_tensor *) override { return false; }

    private_abi::cpu_operation * find(const ggml_tensor * op) override {
        if (op->op != GGML_OP_MUL_MAT_ID || op->src[0]->type != GGML_TYPE_MXFP4) {
            return nullptr;
        }
        const ggml_tensor &w = *op->src[0], &x = *op->src[1];
        const bool fits = w.buffer != nullptr && ggml_backend_buffer_is_host(w.buffer) &&
                          ggml_is_contiguous(&w) && w.ne[1] % expert_tile::n_outputs == 0 &&
                          x.type == GGML_TYPE_F32 && x.nb[0] == sizeof(float) &&
                          op->nb[0] == sizeof(float);
        return fits ? &product_ : nullptr;
    }

  private:
    product product_;
};

// Whether they are asked, and right, with two threads.
bool are_right() {
    constexpr int64_t k = 64, n_outputs = 32, n_experts = 3, n_rows = 2, n_used = 2;
    const ggml_context_ptr context = new_nodes(8);
    ggml_context * ctx = context.get();
    ggml_tensor * w = ggml_new_tensor_3d(ctx, GGML_TYPE_MXFP4, k, n_outputs, n_experts);
    ggml_tensor * x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, k, 1, n_rows);
    ggml_tensor * ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used, n_rows);
    ggml_tensor * y = ggml_mul_mat_id(ctx, w, x, ids);
    ggml_cgraph * graph = ggml_new_graph_custom(ctx, 8, false);
    ggml_build_forward_expand(graph, y);
    const ggml_backend_ptr cpu =
        open_backend(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), 2);
    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx, cpu.get()));
    std::vector<float> weights(ggml_nelements(w)), inputs(ggml_nelements(x));
    for (size_t i = 0; i < weights.size(); i++) {
        weights[i] = std::sin(static_cast<float>(i));
    }
    for (size_t i = 0; i < inputs.size(); i++) {
        inputs[i] = std::cos(static_cast<float>(i));
    }
    const int32_t chosen[] = {2, 0, 1, 2};
    ggml_quantize_chunk(w->type, weights.data(), w->data, 0, n_outputs * n_experts, k, nullptr);
    ggml_get_type_traits(w->type)->to_float(w->data, weights.data(), ggml_nelements(w));
    ggml_backend_tensor_set(x, inputs.data(), 0, ggml_nbytes(x));
    ggml_backend_tensor_set(ids, chosen, 0, sizeof chosen);
    const long before = n_done;
    start_graph(cpu.get(), graph, "to try products with experts");
    const auto * found = static_cast<const float *>(y->data);
    double off = 0.0, size = 0.0;
    for (int64_t i = 0; i < ggml_nelements(y); i++) {
        const int64_t slot = i / n_outputs;
        const float * row = weights.data() + (chosen[slot] * n_outputs + i % n_outputs) * k;
        double expected = 0.0;
        for (int64_t j = 0; j < k; j++) {
            expected += static_cast<double>(row[j]) * inputs[slot / n_used * k + j];
        }
        off += std::pow(found[i] - expected, 2);
        size += expected * expected;
    }
    return n_done == before + 1 && off < 0.02 * 0.02 * size;
}

std::mutex deciding;
std::atomic<products *> installed{nullptr};  // not freed while the CPU's backend may ask it

}  // namespace

std::string speed_up_experts() {
    const std::lock_guard<std::mutex> lock(deciding);
    if (installed != nullptr) {
        return "";
    }
    const expert_tile::kernels * kernels = expert_tile::for_this_processor();
    if (kernels == nullptr) {
        return "this processor has neither AVX2 nor AVX-512";
    }
    auto * ours = new products(*kernels);
    if (!private_abi::add_to_cpu(ours)) {
        delete ours;
        return "llama.cpp's backend for the CPU is not as expected";
    }
    if (!are_right()) {
        private_abi::remove_from_cpu(ours);
        delete ours;
        return "products with experts are wrong on this processor";
    }
    installed = ours;
    return "";
}

bool speeds_up(ggml_type type) { return type == GGML_TYPE_MXFP4 && installed != nullptr; }

long n_expert_products() { return n_done; }

void leave_experts_to_ggml() {
    const std::lock_guard<std::mutex> lock(deciding);
    if (installed != nullptr) {
        private_abi::remove_from_cpu(installed);
        delete installed;
        installed = nullptr;
    }
}

}  // namespace dflash
