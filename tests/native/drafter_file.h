#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "draft_params.h"
#include "ggml-cpp.h"
#include "shipped_pair.h"

// The numbers of a small drafter: one layer, with taps of one target layer; and with a head.
dflash::draft_params small_params(int n_embd = shipped_pair::n_embd);
dflash::draft_params with_markov();
dflash::draft_params with_selector();

// A name in the temporary folder, and the file of that name while this lives.
class temporary_file {
  public:
    temporary_file();
    ~temporary_file();
    temporary_file(const temporary_file &) = delete;
    temporary_file & operator=(const temporary_file &) = delete;

    const std::string & path() const { return path_; }

  private:
    std::string path_;
};

// The tensors of a drafter file in memory, to be changed and written.
class drafter_file {
  public:
    // Random weights of that shape.
    explicit drafter_file(const dflash::draft_params & params);

    // Those of an existing file.
    explicit drafter_file(const std::string & path);

    // A tensor of random weights, or of zeros for types that have none; takes the place of one of
    // the same name.
    void set(const std::string & name, ggml_type type, const std::vector<int64_t> & shape);
    void set(const std::string & name, const std::vector<int64_t> & shape,
             const std::vector<float> & values);
    void set_zeros(const std::string & name, ggml_type type, const std::vector<int64_t> & shape) {
        create(name, type, shape);
    }
    void remove(const std::string & name);

    // The tensors of these heads. n_rows: of the output head. type: of one of their tables.
    void add_markov(int n_rows = shipped_pair::n_vocab, ggml_type type = GGML_TYPE_F16);
    void add_selector(ggml_type type = GGML_TYPE_F16);

    // Every tensor as floats, and the same of another file's tensor under a new name.
    void widen();
    void add_widened(const std::string & path, const std::string & from, const std::string & to);

    void write(const std::string & path) const;

  private:
    ggml_tensor * create(const std::string & name, ggml_type type,
                         const std::vector<int64_t> & shape);

    std::vector<ggml_context_ptr> contexts_;
    std::vector<ggml_tensor *> tensors_;
    uint32_t seed_ = 1;
};
