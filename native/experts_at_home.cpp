#include "experts_at_home.h"

#include <atomic>
#include <map>
#include <mutex>

#include "ggml-backend.h"
#include "private_abi.h"

namespace dflash {

namespace {

using private_abi::device;

thread_local bool stay_now = false;
std::atomic<long> n_kept_so_far{0};

// What devices answered before. Written under the mutex, before the first of our answers.
struct originals {
    std::mutex mutex;
    std::map<ggml_backend_dev_t, device::offload_function> known;
};

// Never freed: devices ask until the process ends.
originals & known_originals() {
    static auto * known = new originals;
    return *known;
}

bool offloads(ggml_backend_dev_t asked, const ggml_tensor * op) {
    device::offload_function original = nullptr;
    {
        originals & o = known_originals();
        const std::lock_guard<std::mutex> lock(o.mutex);
        original = o.known.at(asked);
    }
    const bool would = original(asked, op);
    if (would && stay_now && op->op == GGML_OP_MUL_MAT_ID) {
        n_kept_so_far++;
        return false;
    }
    return would;
}

}  // namespace

experts_at_home::experts_at_home(bool stay) : before_(stay_now) { stay_now = stay; }

experts_at_home::~experts_at_home() { stay_now = before_; }

long experts_at_home::n_kept() { return n_kept_so_far; }

bool experts_at_home::teach_devices() {
    originals & o = known_originals();
    const std::lock_guard<std::mutex> lock(o.mutex);
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t d = ggml_backend_dev_get(i);
        if (ggml_backend_dev_type(d) == GGML_BACKEND_DEVICE_TYPE_CPU || o.known.count(d) > 0) {
            continue;
        }
        if (!private_abi::doubt_device(d).empty()) {
            return false;
        }
        if (private_abi::of(d).offload_op != nullptr) {
            o.known[d] = private_abi::of(d).offload_op;
            private_abi::of(d).offload_op = offloads;
        }
    }
    return true;
}

}  // namespace dflash
