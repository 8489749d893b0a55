// The kernels of core/cuda/collectives.cu, compiled for the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fake_cuda/streams.h"
#include "gpu/launch.h"
#include "gpu/message_ring.h"
#include "kernels/random.h"

namespace fake_cuda {

// NULL: there is none of that name.
const void *find_kernel(const char *name);
std::vector<const char *> kernel_names();  // of all
const char *name_of(const void *kernel);
// Whether it is one of core/cuda/random.cu.
bool is_random(const void *kernel);
void run(const void *kernel, const phx::random::DeviceFill &fill, uint32_t blocks, uint32_t threads,
         Processors &processors);
// Whether it is phx_gpu_messages.
bool is_of_messages(const void *kernel);
void run(const void *kernel, const phx::cuda::Exchange &exchange, uint32_t blocks, uint32_t threads,
         Processors &processors);
// Returns when all blocks are through. `lists`: NULL where the kernel takes none. Each takes a processor as long as it
// runs.
void run(const void *kernel, const phx::cuda::Launch &launch, const phx::cuda::Lists *lists, uint32_t blocks,
         uint32_t threads, Processors &processors);

}  // namespace fake_cuda
