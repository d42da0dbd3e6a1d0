#include "shipped_pair.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace {

constexpr int top_k = 8;
constexpr int n_threads = 1;   // two would wait for each other by spinning
constexpr int n_outputs = 64;  // of a pass, per sequence

const std::string text =
    "class Stack:\n"
    "    def __init__(self):\n"
    "        self.items = []\n\n"
    "    def push(self, item):\n"
    "        self.items.append(item)\n\n"
    "    def pop(self):\n"
    "        if not self.items:\n"
    "            raise IndexError('pop from an empty stack')\n"
    "        return self.items.pop()\n";

std::vector<int32_t> tokenize(const llama_model * model) {
    const llama_vocab * vocab = llama_model_get_vocab(model);
    std::vector<int32_t> tokens(text.size());
    const int n = llama_tokenize(vocab, text.data(), static_cast<int32_t>(text.size()),
                                 tokens.data(), static_cast<int32_t>(tokens.size()), true, true);
    if (n < 32) {
        throw std::runtime_error("the prompt has too few tokens for these tests");
    }
    tokens.resize(n);
    return tokens;
}

}  // namespace

dflash::draft_params shipped_params() {
    dflash::draft_params params;
    params.n_embd = 512;
    params.n_layer = 3;
    params.n_head = 8;
    params.n_head_kv = 2;
    params.head_dim = 64;
    params.block_size = 16;
    params.mask_token = 8191;
    params.n_taps = 3;
    params.is_sliding = {false, false, false};
    params.attention_scale = 0.125f;
    params.rope.n_dims = 64;
    params.rope.n_ctx_orig = 4096;
    params.rope.freq_base = 1e6f;
    return params;
}

shipped_pair::shipped_pair(const std::string & target, std::string drafter)
    : target_path_(target), drafter_path_(std::move(drafter)) {
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    model_.reset(llama_model_load_from_file(target.c_str(), params));
    if (!model_) {
        throw std::runtime_error("cannot load " + target);
    }
    prompt_ = tokenize(model_.get());

    const int n = static_cast<int>(prompt_.size());
    const opened_target opened = open_target(layers());
    if (opened.pass->decode(rows(n)) != 0) {
        throw std::runtime_error("llama_decode failed");
    }
    std::vector<int64_t> stored(n);
    std::iota(stored.begin(), stored.end(), opened.pass->first_stored());
    features_.resize(stored.size() * opened.pass->store()->n_features());
    opened.pass->store()->read(stored, features_.data());
}

opened_target shipped_pair::open_target(const std::vector<int32_t> & layers, int n_stored,
                                        int n_seq) const {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 512;
    params.n_batch = n_batch;
    params.n_ubatch = n_batch;
    params.n_seq_max = n_seq;
    params.n_outputs_max = n_outputs * n_seq;
    params.n_outputs_max_per_seq = n_outputs;
    params.kv_unified = true;
    params.n_threads = n_threads;
    params.n_threads_batch = n_threads;
    opened_target target;
    target.ctx.reset(llama_init_from_model(model_.get(), params));
    target.pass = std::make_unique<dflash::target_pass>(target.ctx.get(), n_seq, layers, n_stored,
                                                        /*in_graph=*/true);
    return target;
}

std::vector<dflash::batch_row> shipped_pair::rows(int n, int first, int seq) const {
    std::vector<dflash::batch_row> rows(n);
    for (int i = 0; i < n; i++) {
        rows[i] = {prompt_[(first + i) % prompt_.size()], first + i, seq, i + 1 == n};
    }
    return rows;
}

std::vector<float> shipped_pair::features(int n, int first) const {
    const size_t width = features_.size() / prompt_.size();
    std::vector<float> out(n * width);
    for (int i = 0; i < n; i++) {
        const size_t row = (first + i) % prompt_.size();
        std::copy_n(features_.data() + row * width, width, out.data() + i * width);
    }
    return out;
}

std::unique_ptr<dflash::fused_drafter> shipped_pair::open_drafter(
    int n_seq, int n_ctx, const dflash::draft_capabilities & allowed, int draft_window) const {
    return std::make_unique<dflash::fused_drafter>(model(), nullptr, drafter_path_,
                                                   shipped_params(), n_seq, n_ctx, top_k, n_threads,
                                                   allowed, draft_window);
}

std::unique_ptr<dflash::fused_drafter> shipped_pair::open_drafter(
    const std::string & path, const dflash::draft_params & params) const {
    return std::make_unique<dflash::fused_drafter>(model(), nullptr, path, params, 1, 1024, top_k,
                                                   n_threads);
}

std::unique_ptr<dflash::fused_drafter> shipped_pair::open_drafter(
    std::shared_ptr<const dflash::tap_store> store, int n_seq) const {
    return std::make_unique<dflash::fused_drafter>(model(), std::move(store), drafter_path_,
                                                   shipped_params(), n_seq, 1024, top_k, n_threads);
}
