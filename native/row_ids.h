#pragma once

#include <cstdint>
#include <vector>

namespace dflash {

// A row's ids in an order in which the first of them comes first out of llama.cpp, too.
//
// llama.cpp puts a row's ids into an unordered set, whose first one says what the row attends to,
// and keeps its graph for as long as these stay the same for all rows. Which one comes first is up
// to the C++ library and to the order in which they go in. Where no order is found that does, the
// answer is the same, but the graph is built anew.
std::vector<int32_t> leading_first(const std::vector<int32_t> & ids);

}  // namespace dflash
