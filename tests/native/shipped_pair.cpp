#include "shipped_pair.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "taps.h"

namespace {

constexpr int top_k = 8;
constexpr int n_threads = 2;

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

shipped_pair::shipped_pair(const std::string & target, std::string drafter)
    : target_path_(target), drafter_path_(std::move(drafter)) {
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    model_.reset(llama_model_load_from_file(target.c_str(), params));
    if (!model_) {
        throw std::runtime_error("cannot load " + target);
    }
    layers_ = open_drafter()->params().target_layers;
    prompt_ = tokenize(model_.get());

    const llama_context_ptr ctx = open_context();
    const dflash::taps taps(ctx.get(), layers_);
    decode(ctx.get(), prompt_);
    std::vector<int32_t> rows(prompt_.size());
    for (size_t i = 0; i < rows.size(); i++) {
        rows[i] = static_cast<int32_t>(i);
    }
    features_.resize(rows.size() * taps.n_taps() * taps.n_embd());
    taps.gather(rows.data(), static_cast<int>(rows.size()), features_.data());
}

llama_context_ptr shipped_pair::open_context() const {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 512;
    params.n_batch = 256;
    params.n_ubatch = 256;
    params.n_threads = n_threads;
    params.n_threads_batch = n_threads;
    return llama_context_ptr(llama_init_from_model(model_.get(), params));
}

void shipped_pair::decode(llama_context * ctx, const std::vector<int32_t> & tokens) const {
    std::vector<int32_t> copy = tokens;
    if (llama_decode(ctx, llama_batch_get_one(copy.data(), static_cast<int32_t>(copy.size())))) {
        throw std::runtime_error("llama_decode failed");
    }
    llama_synchronize(ctx);
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
    int n_seq, int n_ctx, const dflash::draft_capabilities & allowed) const {
    return std::make_unique<dflash::fused_drafter>(model(), drafter_path_, n_seq, n_ctx, top_k,
                                                   n_threads, allowed);
}

std::unique_ptr<dflash::fused_drafter> shipped_pair::open_drafter(const std::string & path) const {
    return std::make_unique<dflash::fused_drafter>(model(), path, 1, 1024, top_k, n_threads);
}
