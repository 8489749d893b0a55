// Memory of NVIDIA GPUs that ranks can share.
#pragma once

#include "memory/allocator.h"

namespace phx::cuda {

// NULL, and *problem says why, where there is no driver.
AllocatorRef make_allocator(std::string *problem);

}  // namespace phx::cuda
