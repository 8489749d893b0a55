// Memory of NVIDIA GPUs that ranks can share.
#pragma once

#include <memory>

#include "gpu/gpu.h"
#include "world/allocator.h"

namespace phx::cuda {

class Memory;

// NULL, and *problem says why, where there is no driver.
AllocatorRef make_allocator(std::string *problem);

// The GPUs of an allocator made here; NULL: it is somebody else's.
Gpus *gpus_of(const Allocator &allocator);

// The memory of a block that came from there.
const Memory &memory_of(const Block &block);

// Makes memory what the functions of that allocator know a block by: they free it from now on.
void hand_over(std::unique_ptr<Memory> memory, void **pointer, uint64_t *cookie);

}  // namespace phx::cuda
