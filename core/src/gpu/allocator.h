// Memory of NVIDIA GPUs that ranks can share.
#pragma once

#include <memory>

#include "gpu/gpu.h"
#include "world/allocator.h"

namespace phx::cuda {

class Memory;

// The allocator of CUDA memory. NULL, and *problem says why, if there is no driver.
AllocatorRef make_allocator(std::string *problem);

// The GPUs of an allocator from make_allocator; NULL for other allocators.
Gpus *gpus_of(const Allocator &allocator);

// The memory of a block from such an allocator.
const Memory &memory_of(const Block &block);

// Turns memory into the pointer and cookie of a block of such an allocator, which owns it from then on.
void hand_over(std::unique_ptr<Memory> memory, void **pointer, uint64_t *cookie);

}  // namespace phx::cuda
