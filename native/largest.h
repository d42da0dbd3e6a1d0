#pragma once

#include <cstdint>
#include <vector>

namespace dflash {

// Index of the largest of a row of n floats, the first of equal ones; -1 if it is not finite or a
// NaN is among them.
int32_t largest_of(const float * row, int n);

// The k largest, largest first, equal ones by index. False, with nothing written, if the largest is
// not finite or a NaN is among them.
bool largest_of(const float * row, int n, int k, int32_t * indices, float * values);

// The k largest of a row of logits with their log-probabilities, in the same order.
void top_k_of(const std::vector<float> & logits, int k, int32_t * ids, float * logprobs);

// Orders n pairs by log-probability, best first; equal ones by id, so that drafts are the same on
// every run.
void sort_best_first(int32_t * ids, float * logprobs, int n);

}  // namespace dflash
