#pragma once

#include <cstdint>

namespace dflash {

// Index of the largest of a row of n floats, the first of equal ones; -1 if it is not finite or a
// NaN is among them.
int32_t largest_of(const float * row, int n);

// The k largest, largest first, equal ones by index. False, with nothing written, if the largest is
// not finite or a NaN is among them.
bool largest_of(const float * row, int n, int k, int32_t * indices, float * values);

}  // namespace dflash
