// What a kernel needs from the block of threads that runs it, in CUDA and on the host. On the host each thread of a
// block is a system thread, so that tests can run every kernel without a GPU (tests/host_blocks.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gpu/launch.h"
#include "phalanx/device.h"

#if defined(__CUDACC__)
#define PHX_DEVICE __device__ __forceinline__
#else
#define PHX_DEVICE inline
#endif

namespace phx::cuda {

// The data of one load or store.
struct alignas(16) Pack {
  uint32_t word[4];
};

#if defined(__CUDACC__)

PHX_DEVICE uint32_t thread_of_block() { return threadIdx.x; }
PHX_DEVICE uint32_t threads_of_block() { return blockDim.x; }
PHX_DEVICE uint32_t block_of_grid() { return blockIdx.x; }
PHX_DEVICE uint32_t blocks_of_grid() { return gridDim.x; }
PHX_DEVICE void sync_block() { __syncthreads(); }
// A barrier with the block of the same number on all ranks, for all threads of the block: see phalanx/device.h. Each
// block has a channel of its own.
PHX_DEVICE int32_t block_barrier(const phx_team *team, uint32_t channel, uint64_t timeout_ns) {
  return phx_team_block_barrier(team, channel + blockIdx.x, timeout_ns);
}
// Returns the value of the first thread to all threads of the block, which then also see what it wrote before.
PHX_DEVICE int32_t from_first(int32_t value) {
  __shared__ int32_t first;
  __syncthreads();
  if (threadIdx.x == 0) first = value;
  __syncthreads();
  return first;
}
// Makes what the threads of the block wrote before their last sync_block visible before later writes of this thread.
PHX_DEVICE void send_out() { __threadfence_system(); }
// Does not load from the cache of this GPU, because another GPU may have written the data since the last load.
PHX_DEVICE Pack load_pack(const void *from) {
  const uint4 seen = __ldcv(static_cast<const uint4 *>(from));
  return {{seen.x, seen.y, seen.z, seen.w}};
}
PHX_DEVICE void store_pack(void *to, const Pack &pack) {
  *static_cast<uint4 *>(to) = make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
}

// Each half is written and read atomically.
PHX_DEVICE void put_line(void *to, const Line &line) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(line.half[0]), "l"(line.half[1])
               : "memory");
}
PHX_DEVICE Line get_line(const void *from) {
  Line line;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(line.half[0]), "=l"(line.half[1])
               : "l"(from)
               : "memory");
  return line;
}

#else

// Defined by the test that runs the kernels.
uint32_t thread_of_block();
uint32_t threads_of_block();
uint32_t block_of_grid();
uint32_t blocks_of_grid();
void sync_block();
int32_t block_barrier(const phx_team *team, uint32_t channel, uint64_t timeout_ns);
int32_t from_first(int32_t value);

PHX_DEVICE void send_out() {}  // phx_word_put orders the writes
PHX_DEVICE Pack load_pack(const void *from) {
  Pack pack;
  std::memcpy(&pack, __builtin_assume_aligned(from, sizeof pack), sizeof pack);
  return pack;
}
PHX_DEVICE void store_pack(void *to, const Pack &pack) {
  std::memcpy(__builtin_assume_aligned(to, sizeof pack), &pack, sizeof pack);
}
PHX_DEVICE void put_line(void *to, const Line &line) {
  for (int i = 0; i < 2; ++i) __atomic_store_n(static_cast<uint64_t *>(to) + i, line.half[i], __ATOMIC_RELAXED);
}
PHX_DEVICE Line get_line(const void *from) {
  Line line;
  for (int i = 0; i < 2; ++i) line.half[i] = __atomic_load_n(static_cast<const uint64_t *>(from) + i, __ATOMIC_RELAXED);
  return line;
}

#endif

// Loads and stores a value like a Pack.
template <class T>
PHX_DEVICE T load_as(const void *from) {
  static_assert(sizeof(T) == sizeof(Pack), "one load");
  const Pack pack = load_pack(from);
  T value;
  std::memcpy(&value, &pack, sizeof value);
  return value;
}
template <class T>
PHX_DEVICE void store_as(void *to, const T &value) {
  static_assert(sizeof(T) == sizeof(Pack), "one store");
  Pack pack;
  std::memcpy(&pack, &value, sizeof pack);
  store_pack(to, pack);
}

PHX_DEVICE size_t thread_of_grid() {
  return static_cast<size_t>(block_of_grid()) * threads_of_block() + thread_of_block();
}
PHX_DEVICE size_t threads_of_grid() { return static_cast<size_t>(blocks_of_grid()) * threads_of_block(); }

}  // namespace phx::cuda
