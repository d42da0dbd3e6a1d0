#pragma once

#include <cstdint>

#include "llama.h"

namespace dflash {

// Takes tokens of a sequence out of a context's memory where llama.cpp's own `seq_rm` refuses to: a
// hybrid one with gated delta nets, whose states we put right ourselves. It calls functions of
// llama.cpp's classes, which not every build exports.
class memory_edit {
  public:
    // ctx may be null: then only the build is looked at.
    explicit memory_edit(llama_context * ctx);

    // Whether this build has the functions.
    bool is_known() const { return remove_ != nullptr && shift_ != nullptr; }

    // Whether the context has a memory of that kind, too.
    bool is_possible() const { return attention_ != nullptr && states_ != nullptr; }

    // A sequence of `length` tokens keeps the first n_kept ones. Its state is not changed.
    void cut(int32_t id, int32_t length, int32_t n_kept) const;

  private:
    void * attention_ = nullptr;  // llama_kv_cache
    void * states_ = nullptr;     // llama_memory_recurrent
    bool (*remove_)(void * cache, llama_seq_id id, llama_pos begin, llama_pos end) = nullptr;
    void (*shift_)(void * states, llama_seq_id id, llama_pos begin, llama_pos end,
                   llama_pos shift) = nullptr;
};

}  // namespace dflash
