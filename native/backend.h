#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>

#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

// Throws std::invalid_argument for a number of threads that ggml does not take.
void check_threads(int n);

// A backend of our own on a device, for graphs beside the target's. n_threads only counts on the
// CPU. Throws std::invalid_argument for a number out of range, backend_error for a device that does
// not open.
ggml_backend_ptr open_backend(ggml_backend_dev_t device, int n_threads);

// Changes nothing on other devices than the CPU.
void set_n_threads(ggml_backend_t backend, int n_threads);

// Whether it is ggml's CUDA backend, for choices between kernels that were measured with it.
bool is_cuda(ggml_backend_t backend);

// Whether it can do all of these.
bool supports(ggml_backend_t backend, std::initializer_list<const ggml_tensor *> ops);

// Starts a graph. Throws backend_error; `what` says at what the backend failed.
void start_graph(ggml_backend_t backend, ggml_cgraph * graph, const char * what);

// Allocates a graph. If the allocator's memory grows for it, `others`, which had the old memory,
// are dropped. False if there is no room.
template <typename Graphs>
bool allocate(ggml_gallocr_t allocator, ggml_cgraph * graph, Graphs & others) {
    const size_t before = ggml_gallocr_get_buffer_size(allocator, 0);
    const bool is_done = ggml_gallocr_alloc_graph(allocator, graph);
    if (!is_done || ggml_gallocr_get_buffer_size(allocator, 0) != before) {
        others.clear();
    }
    return is_done;
}

// Throws backend_error: no room for this.
[[noreturn]] void refuse_room(ggml_backend_t backend, const std::string & what);

// Host memory that a device reads and writes directly, if it has such memory.
ggml_backend_buffer_type_t host_buffer_type(ggml_backend_dev_t device);

// The device of a buffer; the CPU for host memory, which belongs to none.
ggml_backend_dev_t device_of(ggml_backend_buffer_t buffer);

// A context for so many tensors, and one for a graph of so many nodes. Both are without data.
ggml_context_ptr new_tensors(size_t n);
ggml_context_ptr new_nodes(size_t n);

}  // namespace dflash
