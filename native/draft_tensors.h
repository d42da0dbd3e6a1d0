#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "draft_params.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

inline constexpr const char * embedding_name = "token_embd.weight";
inline constexpr const char * head_name = "output.weight";
inline constexpr const char * tokens_name = "d2t";
inline constexpr const char * confidence_name = "conf_proj.weight";
// Of these the host reads the anchor's rows. What the device reads are the rows of drafted tokens.
inline constexpr const char * markov_name = "markov_w1.weight";
inline constexpr const char * selector_name = "selector_predecessor.weight";
inline constexpr const char * selector_after_name = "selector_successor.weight";
inline constexpr const char * markov_drafted = "markov_w1.drafted";
inline constexpr const char * selector_drafted = "selector_predecessor.drafted";
inline constexpr const char * confidence_of_state = "conf_proj.state";

// The tensors of one drafter file as the draft graph wants them: those with a common input side by
// side, some in another type or order of rows. First they are laid out, then taken by their names,
// then read.
class draft_tensors {
  public:
    // Throws file_error for a file that cannot be read, std::invalid_argument as
    // draft_params::check.
    // bf16: whether quantised matrices become bf16; none: if that pays, see bf16_weights.h.
    draft_tensors(const std::string & path, const draft_params & params, ggml_backend_t backend,
                  std::optional<bool> bf16);
    ~draft_tensors();

    // A tensor of one dimension must be of floats, one of two of any type that products take; a
    // length of -1 is any. Null if it is neither there nor required. Throws file_error.
    ggml_tensor * take(const std::string & name, std::vector<int64_t> shape, bool required = true);

    // Gives all of them memory and reads them. Throws file_error if some were not taken, or the
    // file ends too early; backend_error if the device has no room.
    void read();

    ggml_context * on_device() const { return device_tensors_.get(); }
    size_t n_bytes() const { return ggml_backend_buffer_get_size(device_buffer_.get()); }

    // The token of each row of a head that knows only some of them; else empty.
    std::vector<int32_t> tokens;

  private:
    class file_data;

    struct made_tensor {
        ggml_tensor * tensor = nullptr;
        int64_t source = -1;             // its number in the file; -1: it is not read
        std::vector<int64_t> rows = {};  // which ones, and in which order; empty: all
        bool is_taken = false;           // known to the graph
    };

    void read_tokens();
    void create(ggml_context * file);
    void create_tables(ggml_context * file);
    bool pays_in_bf16(ggml_context * file) const;
    bool becomes_bf16(const ggml_tensor * shape) const;
    ggml_type type_of(const ggml_tensor * shape) const;
    std::vector<int64_t> rows_of(const ggml_tensor * shape) const;
    void add(ggml_context * home, const ggml_tensor * shape, int64_t source,
             const std::string & name, ggml_type type, std::vector<int64_t> rows = {});
    void stack_all(ggml_context * file);
    bool stack(ggml_context * file, const std::vector<std::string> & names);
    void read_rows();
    void write_rows(ggml_type type, const std::vector<char> & packed, int64_t n,
                    ggml_tensor * tensor, int64_t first) const;

    const draft_params & params_;
    ggml_backend_t backend_;
    gguf_context_ptr gguf_;  // until all is read, as is the next
    std::unique_ptr<file_data> data_;
    bool is_bf16_ = false;  // quantised matrices become that
    std::map<std::string, made_tensor> made_;
    ggml_context_ptr device_tensors_;
    ggml_context_ptr host_tensors_;
    ggml_backend_buffer_ptr device_buffer_;
    ggml_backend_buffer_ptr host_buffer_;
};

}  // namespace dflash
