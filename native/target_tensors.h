#pragma once

#include <vector>

#include "ggml-backend.h"
#include "llama.h"

namespace dflash {

// The target's tensors that a drafter shares. They belong to the llama_model and live as long as
// it.
struct target_tensors {
    ggml_tensor * embedding = nullptr;  // [n_embd, n_vocab], rows readable from the host
    ggml_tensor * head = nullptr;       // [n_embd, n_vocab], where the target's logits are computed

    // Throws file_error when the model has no token embedding.
    static target_tensors find(const llama_model * model);

    // The device whose memory holds the output head; the CPU when the head is in host memory.
    ggml_backend_dev_t device() const;
};

// Row `token` of an embedding of any ggml type, as floats.
void read_row(const ggml_tensor * embedding, int32_t token, std::vector<float> & row);

}  // namespace dflash
