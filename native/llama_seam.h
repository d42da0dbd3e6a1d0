#pragma once

// Functions that libllama exports but the installed headers do not declare. These are C++ symbols
// of one version of llama.cpp. The build and the import check the version of llama-cpp-python.

#include <string>
#include <utility>
#include <vector>

#include "ggml.h"
#include "llama.h"

const std::vector<std::pair<std::string, ggml_tensor *>> & llama_internal_get_tensor_map(
    const llama_model * model);
