#pragma once

#include "llama.h"

namespace dflash {

// From 32 rows on, ggml copies experts in RAM to a GPU, pass by pass, and computes them there. That
// is right for a prompt's hundreds of rows, but for a round it takes longer than to read them once
// where they are: of gpt-oss-120b's shape with 2 layers' experts in RAM 32 rows took 356 ms beside
// an H200, and 50 on 16 cores.
//
// While one of these lives, passes of this thread leave experts in RAM to the CPU.
class experts_at_home {
  public:
    explicit experts_at_home(bool stay);
    ~experts_at_home();
    experts_at_home(const experts_at_home &) = delete;
    experts_at_home & operator=(const experts_at_home &) = delete;

    // Makes the devices of this process heed it. False where they are not laid out as expected:
    // then nothing changes.
    static bool teach_devices();

    // Products by experts that a device would have taken, so far.
    static long n_kept();

  private:
    bool before_;
};

}  // namespace dflash
