#pragma once

// What libllama exports but the installed headers do not declare. These are C++ symbols of one
// version of llama.cpp: the build checks the version of llama-cpp-python, and so does the import.

#include <string>
#include <utility>
#include <vector>

#include "ggml.h"
#include "llama.h"

void llama_set_embeddings_layer_inp(llama_context * ctx, uint32_t layer, bool value);
float * llama_get_embeddings_layer_inp(llama_context * ctx, uint32_t layer);

const std::vector<std::pair<std::string, ggml_tensor *>> & llama_internal_get_tensor_map(
    const llama_model * model);
