#pragma once

#include <cstdint>
#include <vector>

namespace dflash {

// A row's ids, in an order that makes llama.cpp use the first of them as the leading one.
//
// llama.cpp puts a row's ids into an unordered set. The set's first id says what the row attends
// to, and llama.cpp keeps its graph as long as these first ids stay the same for all rows. Which id
// comes first depends on the C++ library and on the order of insertion. If no order is found, the
// answer is the same, but the graph is built again.
std::vector<int32_t> leading_first(const std::vector<int32_t> & ids);

}  // namespace dflash
