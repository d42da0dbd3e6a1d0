#pragma once

#include <cstddef>

namespace dflash {

// The files of native/cuda/, one after the other: cmake/embed_text.cmake.
extern const char few_rows_text[];
extern const size_t few_rows_text_size;

}  // namespace dflash
