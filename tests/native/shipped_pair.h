#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fused_drafter.h"
#include "llama-cpp.h"

// The shipped target, loaded, with hidden states of a prompt that it has seen.
class shipped_pair {
  public:
    shipped_pair(const std::string & target, std::string drafter);

    const llama_model * model() const { return model_.get(); }
    const std::string & target_path() const { return target_path_; }
    const std::string & drafter_path() const { return drafter_path_; }
    const std::vector<int32_t> & layers() const { return layers_; }
    const std::vector<int32_t> & prompt() const { return prompt_; }

    llama_context_ptr open_context() const;
    void decode(llama_context * ctx, const std::vector<int32_t> & tokens) const;

    // [n, n_features] of the prompt from its row `first` on, over and over.
    std::vector<float> features(int n, int first = 0) const;

    std::unique_ptr<dflash::fused_drafter> open_drafter(
        int n_seq = 1, int n_ctx = 1024, const dflash::draft_capabilities & allowed = {}) const;
    std::unique_ptr<dflash::fused_drafter> open_drafter(const std::string & path) const;

  private:
    std::string target_path_;
    std::string drafter_path_;
    llama_model_ptr model_;
    std::vector<int32_t> layers_;
    std::vector<int32_t> prompt_;
    std::vector<float> features_;
};
