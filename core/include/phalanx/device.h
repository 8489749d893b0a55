/* phalanx/device.h: symmetric memory inside kernels of one's own, in C11, C++17 and CUDA.
 *
 * A rendezvous gives a phx_team (phx_symm_team, in Python SymmetricMemory.team): where the block of every rank is, and
 * a signal pad for each. A kernel reads and writes the blocks like any memory, and orders what it does by signals:
 *
 *     float *mine = phx_team_at(team, team->group_rank, 0);
 *     ... write to mine ...
 *     int32_t status = phx_team_barrier(team, 0, timeout_ns);         // now everybody's block is filled
 *     if (status != 0) return status;
 *     const float *theirs = phx_team_at(team, peer, 0);
 *
 * A signal is a count in a word that one rank writes and one rank reads, and that only grows (modulo 2^32): nothing is
 * ever reset, so a kernel may be launched again, also as part of a graph, and a rank that died leaves nothing half
 * done. The word [channel * group_size + r] of a rank's pad is written by rank r alone. The words of a rank for itself
 * count its barriers. Channels do not disturb each other; use one either from here or through phx_symm_put_signal and
 * phx_symm_wait_signal, not both, and either for barriers or for put and wait, not both.
 *
 * Waits return 0; or 1 + the group rank that is late, after timeout_ns; or PHX_ERR_REVOKED once the group has failed,
 * as when a rank has died: phx_group_error tells the cause. After that a channel may be out of step: make a new group.
 * Everything is for one thread of each rank at a time and channel, but for what has `block` in its name. */
#ifndef PHALANX_DEVICE_H
#define PHALANX_DEVICE_H

#include "phalanx/phalanx.h"

#ifdef __CUDACC__
#define PHX_FN static __device__ __forceinline__
#else
#include <sched.h>
#include <time.h>
#ifndef CLOCK_MONOTONIC
#error "with -std=c11 define _POSIX_C_SOURCE as 200809L before the first #include, or use -std=gnu11"
#endif
#define PHX_FN static inline
#endif

/* ---- what differs between processors ------------------------------------------------------------------------ */

/* Writes a word; whoever sees it with phx_word_get sees all that was written before. */
PHX_FN void phx_word_put(uint32_t *word, uint32_t value) {
#ifdef __CUDA_ARCH__
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#elif !defined(__CUDACC__)
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

PHX_FN uint32_t phx_word_get(const uint32_t *word) {
#ifdef __CUDA_ARCH__
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#elif !defined(__CUDACC__)
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#else
  return *word; /* nvcc's pass for the host, where no kernel runs */
#endif
}

PHX_FN uint64_t phx_clock_ns(void) {
#ifdef __CUDA_ARCH__
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#elif !defined(__CUDACC__)
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
#else
  return 0;
#endif
}

/* Between two looks at a word: at first the processor rests for some cycles, later others may run. */
PHX_FN void phx_pause(uint32_t looks) {
#ifdef __CUDA_ARCH__
  if (looks > 64) __nanosleep(20);
#elif !defined(__CUDACC__)
  if (looks > 2000) {
    sched_yield();
  } else {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }
#else
  (void)looks;
#endif
}

/* ---- memory and signals ------------------------------------------------------------------------------------- */

/* `offset` bytes into the block of a rank. */
PHX_FN void *phx_team_at(const phx_team *team, int32_t group_rank, size_t offset) {
  return (char *)team->buffers[group_rank] + offset;
}

PHX_FN uint32_t *phx_team_word(const phx_team *team, int32_t pad_of, uint32_t channel, int32_t from) {
  return team->pads[pad_of] + (size_t)channel * (size_t)team->group_size + (size_t)from;
}

/* What this rank last put for another one, 0 at first: the next signal is this + 1. */
PHX_FN uint32_t phx_team_last(const phx_team *team, uint32_t channel, int32_t to) {
  return phx_word_get(phx_team_word(team, to, channel, team->group_rank));
}

/* Tells a rank that `count` is reached. What was written before is visible to it after its wait. Never waits. */
PHX_FN void phx_team_put(const phx_team *team, uint32_t channel, int32_t to, uint32_t count) {
  phx_word_put(phx_team_word(team, to, channel, team->group_rank), count);
}

/* Waits until a rank has put `count` or more for this one. */
PHX_FN int32_t phx_team_wait(const phx_team *team, uint32_t channel, int32_t from, uint32_t count,
                             uint64_t timeout_ns) {
  const uint32_t *word = phx_team_word(team, team->group_rank, channel, from);
  uint64_t begun = 0;
  uint32_t looks = 0;
  while ((int32_t)(phx_word_get(word) - count) < 0) {
    if ((++looks & 63) == 0) {
      const uint64_t now = phx_clock_ns();
      if (phx_word_get((const uint32_t *)team->failed + from) != 0) /* it may have put it before it left */
        return (int32_t)(phx_word_get(word) - count) < 0 ? PHX_ERR_REVOKED : 0;
      if (begun == 0) begun = now;
      if (now - begun > timeout_ns) return 1 + from;
    }
    phx_pause(looks);
  }
  return 0;
}

/* Waits until every rank has come to this barrier. What any of them wrote before is visible to all after it. */
PHX_FN int32_t phx_team_barrier(const phx_team *team, uint32_t channel, uint64_t timeout_ns) {
  const int32_t self = team->group_rank;
  const int32_t size = team->group_size;
  const uint32_t count = phx_team_last(team, channel, self) + 1;
  int32_t step;
  for (step = 1; step <= size; ++step) phx_team_put(team, channel, (self + step) % size, count); /* itself last */
  for (step = 1; step < size; ++step) {
    const int32_t status = phx_team_wait(team, channel, (self + step) % size, count, timeout_ns);
    if (status != 0) return status;
  }
  return 0;
}

/* ---- CUDA --------------------------------------------------------------------------------------------------- */

#ifdef __CUDACC__

/* phx_team_barrier of a whole block with the blocks that call it with the same channel on the other ranks, such as
 * blockIdx.x. For all threads of the block, at least group_size of them; all get the same result. */
PHX_FN int32_t phx_team_block_barrier(const phx_team *team, uint32_t channel, uint64_t timeout_ns) {
  __shared__ uint32_t count;
  __shared__ int32_t result;
  const int32_t self = team->group_rank;
  const int32_t other = static_cast<int32_t>(threadIdx.x);
  __syncthreads(); /* all have done what the barrier is for, and have read the result of the one before */
  if (threadIdx.x == 0) {
    count = phx_team_last(team, channel, self) + 1;
    result = 0;
  }
  __syncthreads();
  if (other < team->group_size) {
    __threadfence_system(); /* what other threads of the block wrote goes out as well */
    phx_team_put(team, channel, other, count);
    const int32_t status = other == self ? 0 : phx_team_wait(team, channel, other, count, timeout_ns);
    if (status != 0) result = status;
  }
  __syncthreads();
  return result;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
/* The sum of 8 bfloat16 over the blocks of all ranks, added up in float32 by the switch. `at` is inside
 * team->multicast. */
PHX_FN uint4 phx_multicast_sum_bf16x8(const void *at) {
  uint4 sum = {0, 0, 0, 0};
#ifdef __CUDA_ARCH__
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
               : "=r"(sum.x), "=r"(sum.y), "=r"(sum.z), "=r"(sum.w)
               : "l"(at)
               : "memory");
#endif
  return sum;
}

/* Writes 16 bytes to the blocks of all ranks. */
PHX_FN void phx_multicast_put(void *at, uint4 value) {
#ifdef __CUDA_ARCH__
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(__uint_as_float(value.x)),
               "f"(__uint_as_float(value.y)), "f"(__uint_as_float(value.z)), "f"(__uint_as_float(value.w))
               : "memory");
#endif
}
#endif

#endif /* __CUDACC__ */

#endif /* PHALANX_DEVICE_H */
