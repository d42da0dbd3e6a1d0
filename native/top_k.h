#pragma once

#include <cstdint>
#include <vector>

namespace dflash {

// Orders n pairs by log-probability, best first; equal ones by id, so that drafts are the same on
// every run.
void sort_best_first(int32_t * ids, float * logprobs, int n);

// The k best of a row of logits with their log-probabilities, best first.
void top_k_of(const std::vector<float> & logits, int k, int32_t * ids, float * logprobs);

}  // namespace dflash
