// What a kernel needs of the block of threads that runs it: CUDA's, or the host's, where each thread of a block is a
// thread of the system, so that every kernel runs where there is no GPU (tests/host_blocks.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "phalanx/device.h"

#if defined(__CUDACC__)
#define PHX_DEVICE __device__ __forceinline__
#else
#define PHX_DEVICE inline
#endif

namespace phx::cuda {

// As much as one load or store moves.
struct alignas(16) Pack {
  uint32_t word[4];
};

#if defined(__CUDACC__)

PHX_DEVICE uint32_t thread_of_block() { return threadIdx.x; }
PHX_DEVICE uint32_t threads_of_block() { return blockDim.x; }
PHX_DEVICE uint32_t block_of_grid() { return blockIdx.x; }
PHX_DEVICE uint32_t blocks_of_grid() { return gridDim.x; }
// For all threads of the block: see phalanx/device.h. Each block has a channel of its own.
PHX_DEVICE int32_t meet(const phx_team *team, uint32_t channel, uint64_t timeout_ns) {
  return phx_team_block_barrier(team, channel + blockIdx.x, timeout_ns);
}
// Another GPU may have written it since the last look, so not from this one's cache.
PHX_DEVICE Pack load_pack(const void *from) {
  const uint4 seen = __ldcv(static_cast<const uint4 *>(from));
  return {{seen.x, seen.y, seen.z, seen.w}};
}
PHX_DEVICE void store_pack(void *to, const Pack &pack) {
  *static_cast<uint4 *>(to) = make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
}

#else

// Given by whoever runs the kernels.
uint32_t thread_of_block();
uint32_t threads_of_block();
uint32_t block_of_grid();
uint32_t blocks_of_grid();
int32_t meet(const phx_team *team, uint32_t channel, uint64_t timeout_ns);

PHX_DEVICE Pack load_pack(const void *from) {
  Pack pack;
  std::memcpy(&pack, __builtin_assume_aligned(from, sizeof pack), sizeof pack);
  return pack;
}
PHX_DEVICE void store_pack(void *to, const Pack &pack) {
  std::memcpy(__builtin_assume_aligned(to, sizeof pack), &pack, sizeof pack);
}

#endif

PHX_DEVICE size_t thread_of_grid() {
  return static_cast<size_t>(block_of_grid()) * threads_of_block() + thread_of_block();
}
PHX_DEVICE size_t threads_of_grid() { return static_cast<size_t>(blocks_of_grid()) * threads_of_block(); }

}  // namespace phx::cuda
