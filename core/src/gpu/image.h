// The compiled kernels (core/cuda/collectives.cu): inside this library if it was built with nvcc, or in a file.
#pragma once

#include "phalanx/phalanx.h"

namespace phx::cuda {

// What cuModuleLoadData takes: the file that PHALANX_CUDA_KERNELS names, or what the library was built with.
phx_status find_image(const char *operation, const void **image);

}  // namespace phx::cuda
