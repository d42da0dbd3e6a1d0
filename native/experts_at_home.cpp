#include "experts_at_home.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "expert_products.h"
#include "ggml-backend.h"
#include "private_abi.h"

namespace dflash {

namespace {

using private_abi::device;

std::atomic<long> n_kept{0};
std::atomic<int64_t> most_rows_of_ours{most_rows_at_home};

// The most rows that stay at home with a product by experts, or with what adds their biases to it.
int64_t most_rows(const ggml_tensor * op) {
    const ggml_tensor * product = op->op == GGML_OP_ADD_ID ? op->src[0] : op;
    const bool is_ours = product->op == GGML_OP_MUL_MAT_ID && speeds_up(product->src[0]->type);
    return is_ours ? most_rows_of_ours.load() : most_rows_at_home;
}

// What devices answered before. Written under the mutex, before the first of our answers.
struct originals {
    std::mutex mutex;
    std::map<ggml_backend_dev_t, device::offload_function> known;
};

// Never freed: devices ask until the process ends.
originals & known_originals() {
    static auto * known = new originals;
    return *known;
}

bool offloads(ggml_backend_dev_t asked, const ggml_tensor * op) {
    device::offload_function original = nullptr;
    {
        originals & o = known_originals();
        const std::lock_guard<std::mutex> lock(o.mutex);
        original = o.known.at(asked);
    }
    const bool would = original(asked, op);
    // With the biases of experts, where they have any.
    const bool is_of_experts = op->op == GGML_OP_MUL_MAT_ID || op->op == GGML_OP_ADD_ID;
    if (would && is_of_experts && op->ne[2] <= most_rows(op)) {
        n_kept++;
        return false;
    }
    return would;
}

}  // namespace

long n_experts_kept() { return n_kept; }

bool has_experts_in_ram(const llama_model * model) {
    const auto & all = private_abi::tensors_of(model);
    return std::any_of(all.begin(), all.end(), [](const auto & each) {
        const ggml_tensor * t = each.second;
        return each.first.find("_exps") != std::string::npos && t->buffer != nullptr &&
               ggml_backend_buffer_is_host(t->buffer);
    });
}

bool keep_experts_at_home(int n_threads) {
    most_rows_of_ours = std::max(most_rows_at_home, n_threads * rows_a_thread);
    originals & o = known_originals();
    const std::lock_guard<std::mutex> lock(o.mutex);
    std::vector<ggml_backend_dev_t> asked;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t d = ggml_backend_dev_get(i);
        const bool is_host = ggml_backend_dev_type(d) == GGML_BACKEND_DEVICE_TYPE_CPU;
        if (is_host || o.known.count(d) > 0 || private_abi::of(d).offload_op == nullptr) {
            continue;
        }
        if (!private_abi::doubt_device(d).empty()) {
            return false;
        }
        asked.push_back(d);
    }
    for (ggml_backend_dev_t d : asked) {
        o.known[d] = private_abi::of(d).offload_op;
        private_abi::of(d).offload_op = offloads;
    }
    return true;
}

}  // namespace dflash
