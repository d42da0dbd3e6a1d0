#pragma once

#include <cstdint>
#include <vector>

#include "private_abi.h"

namespace dflash {

// All that decides what a graph of ggml does on a device: operations and their parameters, shapes,
// strides and addresses of nodes and sources. Two graphs of equal content launch the same kernels.
class graph_content {
  public:
    graph_content() = default;
    explicit graph_content(const private_abi::graph & g) { read(g); }

    // In place of what it was, in the same memory: a graph of an 8B model takes some 300 KB.
    void read(const private_abi::graph & g);

    uint64_t hash() const { return hash_; }
    bool operator==(const graph_content & other) const { return words_ == other.words_; }

  private:
    std::vector<uint64_t> words_;
    uint64_t hash_ = 0;
};

}  // namespace dflash
