#pragma once

#include "ggml-backend.h"

namespace dflash {

// Host memory that a device reads and writes directly, if it has such memory.
inline ggml_backend_buffer_type_t host_buffer_type(ggml_backend_dev_t device) {
    ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(device);
    return type != nullptr ? type
                           : ggml_backend_dev_buffer_type(
                                 ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
}

}  // namespace dflash
