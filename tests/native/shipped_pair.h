#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fused_drafter.h"
#include "llama-cpp.h"
#include "target_pass.h"

// The numbers of the shipped drafter.
dflash::draft_params shipped_params();

// A context of the shipped target, and the passes through it.
struct opened_target {
    std::unique_ptr<dflash::target_pass> pass;
    llama_context_ptr ctx;  // goes first
};

// The shipped target, loaded, with hidden states of a prompt that it has seen.
class shipped_pair {
  public:
    shipped_pair(const std::string & target, std::string drafter);

    const llama_model * model() const { return model_.get(); }
    const std::string & target_path() const { return target_path_; }
    const std::string & drafter_path() const { return drafter_path_; }
    static constexpr int n_embd = 512;
    static constexpr int n_vocab = 8192;
    static std::vector<int32_t> layers() { return {2, 4, 6}; }  // that the drafter wants tapped
    const std::vector<int32_t> & prompt() const { return prompt_; }

    // The most rows of one pass.
    static constexpr int n_batch = 256;

    // With taps of these layers, n_stored rows of which are kept.
    opened_target open_target(const std::vector<int32_t> & layers, int n_stored = n_batch,
                              int n_seq = 1) const;

    // n tokens of the prompt from its token `first` on, over and over, at the positions from
    // `first` on of a sequence; logits are wanted of the last.
    std::vector<dflash::batch_row> rows(int n, int first = 0, int seq = 0) const;

    // [n, n_features] of the prompt from its row `first` on, over and over.
    std::vector<float> features(int n, int first = 0) const;

    std::unique_ptr<dflash::fused_drafter> open_drafter(
        int n_seq = 1, int n_ctx = 1024, const dflash::draft_capabilities & allowed = {},
        int draft_window = 0) const;
    std::unique_ptr<dflash::fused_drafter> open_drafter(const std::string & path,
                                                        const dflash::draft_params & params) const;
    std::unique_ptr<dflash::fused_drafter> open_drafter(
        std::shared_ptr<const dflash::tap_store> store, int n_seq = 1) const;

  private:
    std::string target_path_;
    std::string drafter_path_;
    llama_model_ptr model_;
    std::vector<int32_t> prompt_;
    std::vector<float> features_;
};
