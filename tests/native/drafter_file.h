#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml-cpp.h"
#include "gguf.h"

// A drafter file in memory, to be changed and written.
class drafter_file {
  public:
    // One layer of random weights, n_embd wide, with taps of one target layer.
    explicit drafter_file(int64_t n_embd);

    // An existing file.
    explicit drafter_file(const std::string & path);

    gguf_context * keys() { return keys_.get(); }

    // A tensor of random weights, or of zeros for types that have none; takes the place of one of
    // the same name.
    void set(const std::string & name, ggml_type type, const std::vector<int64_t> & shape);
    void set(const std::string & name, const std::vector<int64_t> & shape,
             const std::vector<float> & values);
    void set_zeros(const std::string & name, ggml_type type, const std::vector<int64_t> & shape) {
        create(name, type, shape);
    }
    void remove(const std::string & name);

    // Every tensor as floats, and the same of another file's tensor under a new name.
    void widen();
    void add_widened(const std::string & path, const std::string & from, const std::string & to);

    void write(const std::string & path) const;

  private:
    ggml_tensor * create(const std::string & name, ggml_type type,
                         const std::vector<int64_t> & shape);

    gguf_context_ptr keys_;
    std::vector<ggml_context_ptr> contexts_;
    std::vector<ggml_tensor *> tensors_;
    uint32_t seed_ = 1;
};
