#pragma once

#include <cstdint>

namespace dflash {

// Index of the largest of a row of n floats, the first of equals; -1 where it is no finite number
// or a NaN is among them.
int32_t largest_of(const float * row, int n);

// The k largest, largest first, equals by index. False, with nothing written, where the largest is
// no finite number or a NaN is among them.
bool largest_of(const float * row, int n, int k, int32_t * indices, float * values);

}  // namespace dflash
