// A collective of one's own: an all_gather around a ring. Each rank has written its part into its own block; in each
// step it hands the part that came last to its right neighbour, so that after group_size - 1 steps everybody has all.
//
// One source for two compilers:
//
//     include=$(python -m phalanx.core --include-dir)
//     c++ -std=c++17 -O3 -fPIC -shared -I "$include" own_collective.cpp -o own_collective.so
//     nvcc -std=c++17 -O3 -x cu -Xcompiler -fPIC -shared -I "$include" own_collective.cpp -o own_collective.so
//
// own_collective.py compiles it for the CPU and calls it.
#include <phalanx/device.h>

#ifdef __CUDACC__
#define KERNEL static __global__ void
// A block of threads works as one: all have written before one of them signals, and all learn what it has found.
PHX_FN bool is_first() { return threadIdx.x == 0; }
PHX_FN void all_have_written() {
  __threadfence_system();
  __syncthreads();
}
PHX_FN int32_t told_by_first(int32_t status) {
  __shared__ int32_t shared;
  if (is_first()) shared = status;
  __syncthreads();
  status = shared;
  __syncthreads();
  return status;
}
PHX_FN void copy(char *to, const char *from, size_t bytes) {
  for (size_t i = threadIdx.x; i < bytes / 16; i += blockDim.x)
    reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(from)[i];
}
PHX_FN int32_t barrier(const phx_team &team, uint32_t channel, uint64_t timeout_ns) {
  return phx_team_block_barrier(&team, channel, timeout_ns);
}
#else
#include <cstring>
PHX_FN bool is_first() { return true; }
PHX_FN void all_have_written() {}
PHX_FN int32_t told_by_first(int32_t status) { return status; }
PHX_FN void copy(char *to, const char *from, size_t bytes) { std::memcpy(to, from, bytes); }
PHX_FN int32_t barrier(const phx_team &team, uint32_t channel, uint64_t timeout_ns) {
  return phx_team_barrier(&team, channel, timeout_ns);
}
#endif

struct arguments {
  size_t bytes;  // of a part; the parts lie one after another in each rank's block. A multiple of 16.
  uint64_t timeout_ns;
};

// Bytes `from` to `to` of each part. Uses two channels: `channel` for a barrier, the next one for the ring.
PHX_FN int32_t ring(const phx_team &team, const arguments &a, uint32_t channel, size_t from, size_t to) {
  const int32_t size = team.group_size, self = team.group_rank;
  const int32_t right = (self + 1) % size, left = (self + size - 1) % size;
  char *mine = static_cast<char *>(phx_team_at(&team, self, 0));
  char *theirs = static_cast<char *>(phx_team_at(&team, right, 0));
  uint32_t count = phx_team_last(&team, channel + 1, right);  // grows by one in each step, on all ranks alike
  int32_t status = barrier(team, channel, a.timeout_ns);      // nobody reads the result of the last time any more
  for (int32_t step = 0; step + 1 < size && status == 0; ++step) {
    const size_t part = static_cast<size_t>((self + size - step) % size) * a.bytes;
    copy(theirs + part + from, mine + part + from, to - from);
    all_have_written();
    ++count;
    if (is_first()) {
      phx_team_put(&team, channel + 1, right, count);
      status = phx_team_wait(&team, channel + 1, left, count, a.timeout_ns);
    }
    status = told_by_first(status);
  }
  return status;
}

#ifdef __CUDACC__

KERNEL run(phx_team team, arguments a, int32_t *status) {
  const size_t units = a.bytes / 16;
  const size_t from = units * blockIdx.x / gridDim.x * 16, to = units * (blockIdx.x + 1) / gridDim.x * 16;
  const int32_t failed = ring(team, a, 2 * blockIdx.x, from, to);
  if (failed != 0 && is_first()) *status = failed;
}

// `status`: a word that the device can write, 0 at first. Two channels for each block.
extern "C" PHX_API int ring_all_gather(const phx_team *team, const arguments *a, int32_t *status, void *stream) {
  run<<<team->channels / 2, 256, 0, static_cast<cudaStream_t>(stream)>>>(*team, *a, status);
  return static_cast<int>(cudaGetLastError());
}

#else

// Collective. 0, or as phx_team_barrier.
extern "C" PHX_API int32_t ring_all_gather(const phx_team *team, const arguments *a);
extern "C" int32_t ring_all_gather(const phx_team *team, const arguments *a) { return ring(*team, *a, 2, 0, a->bytes); }

#endif
