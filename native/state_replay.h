#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "llama.h"
#include "private_abi.h"
#include "thread_pool.h"

namespace dflash {

// Takes back the last rows of a pass over gated delta nets. Such a layer has one state for all rows
// of a sequence, and the pass overwrites it. What the layers computed it from is kept until the
// next pass: the state before, and keys, values, gates and betas of the rows. To take rows back,
// the rows that stay are computed into the old state once more, without the rest of the model. The
// same holds for the convolution before each of them, whose state is its last inputs, and for
// layers that are a convolution and nothing more.
//
// This costs no plain step anything, and one state more in memory for each sequence of a pass.
class state_replay {
  public:
    // n_returned: the most rows of a pass that can be taken back. Throws std::invalid_argument if
    // the context has no such memory.
    state_replay(llama_context * ctx, int n_returned, std::shared_ptr<thread_pool> threads);
    ~state_replay();

    state_replay(const state_replay &) = delete;
    state_replay & operator=(const state_replay &) = delete;

    // llama.cpp has built this graph of a pass: keep what its layers consume.
    void mark(ggml_context * nodes, ggml_cgraph * graph);

    // Forgets the last pass. The device is idle then.
    void begin_pass();

    // The pass is done: the sequences and positions of its rows. True: all rows but the first of
    // each sequence can be taken back.
    bool end_pass(const std::vector<int32_t> & seqs, const std::vector<int32_t> & positions);

    // A sequence of the last pass keeps n_kept of its rows, from 1 to those it has. Its state is
    // right after `wait`. Throws std::invalid_argument for what is impossible.
    void keep(int32_t seq, int32_t n_kept);

    // Gives the devices what they have to do. The host is busy with that for a part of a
    // millisecond, so it is done while a device drafts.
    void start();

    // Waits until all states are in llama.cpp's memory.
    void wait();

  private:
    struct net;
    struct device;

    struct part {  // the rows of a sequence in the last pass
        int32_t seq;
        int32_t begin;
        int32_t n_kept;
        bool is_waiting = false;  // for `start`
    };

    bool is_complete(ggml_cgraph * graph);
    std::vector<ggml_tensor *> consumed() const;
    bool is_kept() const;
    bool open();

    private_abi::hybrid_memory memory_;
    int n_returned_;
    std::shared_ptr<thread_pool> threads_;
    std::vector<net> nets_;  // of llama.cpp's last graph; empty if it cannot be replayed
    ggml_cgraph * graph_ = nullptr;
    bool is_open_ = false;  // the nets have been given to their devices
    int64_t n_rows_ = 0;    // of each sequence in that graph
    int64_t n_seqs_ = 0;
    std::vector<part> parts_;
    std::vector<std::unique_ptr<device>> devices_;
};

}  // namespace dflash
