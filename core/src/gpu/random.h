// Random elements in GPU memory.
#pragma once

#include "kernels/random.h"

namespace phx::random {

// Puts the kernel that fills a box on the stream. Precondition: the pair of kind and dtype exists; the box is checked.
phx_status fill_on_gpu(const char *operation, const phx_device &device, void *stream, int32_t kind, int32_t dtype,
                       void *out, uint64_t key, const Settings &settings, const Box &box);

}  // namespace phx::random
