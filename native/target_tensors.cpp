#include "target_tensors.h"

#include <string>

#include "backend.h"
#include "errors.h"
#include "private_abi.h"

namespace dflash {

target_tensors target_tensors::find(const llama_model * model) {
    target_tensors found;
    // A tied model that is offloaded, or repacked for the CPU, has the embedding twice under one
    // name. Rows are read from the plain copy on the host, logits are computed with the other.
    std::vector<ggml_tensor *> embeddings;
    for (const auto & [name, tensor] : private_abi::tensors_of(model)) {
        if (name == "output.weight") {
            found.head = tensor;
        } else if (name == "token_embd.weight") {
            embeddings.push_back(tensor);
        }
    }
    for (ggml_tensor * tensor : embeddings) {
        const bool on_host =
            tensor->buffer != nullptr && ggml_backend_buffer_is_host(tensor->buffer);
        if (found.embedding == nullptr || on_host) {
            found.embedding = tensor;
        }
    }
    if (found.embedding == nullptr) {
        throw file_error("the target has no tensor token_embd.weight to share with a drafter");
    }
    for (ggml_tensor * tensor : embeddings) {
        if (found.head == nullptr && tensor != found.embedding) {
            found.head = tensor;
        }
    }
    if (found.head == nullptr) {
        found.head = found.embedding;
    }
    return found;
}

ggml_backend_dev_t target_tensors::device() const {
    const bool on_host = head->buffer == nullptr || ggml_backend_buffer_is_host(head->buffer);
    return on_host ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)
                   : device_of(head->buffer);
}

void read_row(const ggml_tensor * embedding, int32_t token, std::vector<float> & row) {
    const int64_t n = embedding->ne[0];
    row.resize(n);
    const size_t offset = static_cast<size_t>(token) * embedding->nb[1];
    if (embedding->type == GGML_TYPE_F32) {
        ggml_backend_tensor_get(embedding, row.data(), offset, n * sizeof(float));
        return;
    }
    const ggml_to_float_t to_float = ggml_get_type_traits(embedding->type)->to_float;
    if (to_float == nullptr) {
        throw backend_error(std::string("embeddings of type ") + ggml_type_name(embedding->type) +
                            " cannot be read row by row");
    }
    std::vector<char> packed(ggml_row_size(embedding->type, n));
    ggml_backend_tensor_get(embedding, packed.data(), offset, packed.size());
    to_float(packed.data(), row.data(), n);
}

}  // namespace dflash
