// Random elements in memory of a GPU.
#pragma once

#include "kernels/random_box.h"

namespace phx::random {

// Puts the kernel on the stream that fills a box. The pair is defined, and the box checked.
phx_status fill_on_gpu(const char *operation, const phx_device &device, void *stream, int32_t kind, int32_t dtype,
                       void *out, uint64_t key, const Settings &settings, const Box &box);

}  // namespace phx::random
