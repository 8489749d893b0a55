/* phalanx/device.h: symmetric memory inside kernels of one's own, in C11, C++17 and CUDA.
 *
 * A rendezvous gives a phx_team (phx_symm_get_team, in Python SymmetricMemory.team): where the block of every rank is,
 * and a signal pad for each. A kernel reads and writes the blocks like any memory, and orders what it does by signals:
 *
 *     float *mine = phx_team_at(team, team->group_rank, 0);
 *     ... write to mine ...
 *     int32_t status = phx_team_barrier(team, 0, timeout_ns);         // now everybody's block is filled
 *     if (status != 0) return status;
 *     const float *theirs = phx_team_at(team, peer, 0);
 *
 * A signal is a count in a word that one rank writes and one rank reads, and that only grows (modulo 2^32): nothing is
 * ever reset, so a kernel may be launched again, also as part of a graph, and a rank that died leaves nothing half
 * done. The word [r * pad_stride + channel] of a rank's pad is written by rank r alone. The words of a rank for itself
 * count its barriers. Channels do not disturb each other; use one either from here or through phx_symm_put_signal and
 * phx_symm_wait_signal, not both, and either for barriers or for put and wait, not both.
 *
 * Waits return 0; or 1 + the group rank that is late, after timeout_ns; or PHX_ERR_REVOKED once the group has failed,
 * as when a rank has died: phx_group_get_error tells the cause. After that a channel may be out of step: make a new
 * group. Everything is for one thread of each rank at a time and channel, but for what has `block` in its name.
 *
 * Parameters of all functions:
 *
 *   - team: where the blocks and pads of the ranks are, from phx_symm_get_team.
 *   - pad_of: the group rank whose pad it is.
 *   - from, to: the group rank of the other side.
 *   - count: how many signals there are then, in all.
 *   - timeout_ns: how long to wait, in nanoseconds.
 *   - word: a word of a signal pad.
 *   - value: what is written.
 *
 * Names with `private` in them are no API. PHX_FN marks a function for both processors; sources may use it too. */
#ifndef PHALANX_DEVICE_H
#define PHALANX_DEVICE_H

#include "phalanx/phalanx.h"

#ifdef __CUDACC__
#define PHX_FN static __device__ __forceinline__
#else
#include <sched.h>
#include <string.h>
#include <time.h>
#ifdef CLOCK_MONOTONIC
#define PHX_PRIVATE_MONOTONIC CLOCK_MONOTONIC
#else /* -std=c11: the C library has it, but its header does not declare it */
#define PHX_PRIVATE_MONOTONIC 1
extern int clock_gettime(int clock, struct timespec *now);
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

PHX_FN uint64_t phx_private_clock_ns(void) {
#ifdef __CUDA_ARCH__
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#elif !defined(__CUDACC__)
  struct timespec now;
  clock_gettime(PHX_PRIVATE_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
#else
  return 0;
#endif
}

/* Between two looks at a word: at first the processor rests for some cycles, later others may run. */
PHX_FN void phx_private_pause(uint32_t looks) {
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
  return team->pads[pad_of] + (size_t)from * team->pad_stride + channel;
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
      const uint64_t now = phx_private_clock_ns();
      if (phx_word_get((const uint32_t *)team->failed + from) != 0) /* it may have put it before it left */
        return (int32_t)(phx_word_get(word) - count) < 0 ? PHX_ERR_REVOKED : 0;
      if (begun == 0) begun = now;
      if (now - begun > timeout_ns) return 1 + from;
    }
    phx_private_pause(looks);
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

/* ---- NVLink switches ---------------------------------------------------------------------------------------- */

/* Where team->multicast is not NULL, switches write what is stored there to the blocks of all ranks, and reduce what is
 * loaded from there over them. Only these functions may use that address. `offset` is into the blocks, and a multiple
 * of 16. For CUDA from sm_90 on; for older ones they are not there. On the host they go over the blocks one after the
 * other, so that a kernel can be tested where there is no switch.
 *
 * Switches add in an order of their own, which may be another one at the next load: sums of floats have the same bits
 * on all ranks only where one rank loads them and puts them to all. Sums of 16-bit floats are added up in float32 and
 * rounded once. Left open is what the bits of a NaN are, and whether a minimum or maximum with one is one. */

/* 16 bytes of elements. */
typedef struct phx_pack {
  uint32_t word[4];
} phx_pack;

#if !defined(__CUDACC__)

static inline float phx_private_float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
static inline uint32_t phx_private_bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
static inline float phx_private_float_of_bf16(uint16_t raw) { return phx_private_float_of_bits((uint32_t)raw << 16); }
static inline uint16_t phx_private_bf16_of_float(float value) { /* to nearest even */
  const uint32_t bits = phx_private_bits_of_float(value);
  return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
static inline float phx_private_float_of_f16(uint16_t raw) {
  const uint32_t sign = (raw & 0x8000u) << 16, magnitude = raw & 0x7fffu;
  if (magnitude >= 0x7c00u)
    return phx_private_float_of_bits(sign | (magnitude << 13) | 0x7f800000u); /* infinities, NaNs */
  if (magnitude >= 0x0400u) return phx_private_float_of_bits(sign | ((magnitude << 13) + (112u << 23)));
  return phx_private_float_of_bits(sign | phx_private_bits_of_float((float)magnitude * 0x1p-24f));
}
static inline uint16_t phx_private_f16_of_float(float value) { /* to nearest even */
  const uint32_t bits = phx_private_bits_of_float(value), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  if (value != value) return 0x7e00;
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* from halfway between the largest and 2^16 on */
  if (magnitude >= 0x38800000u)
    return (uint16_t)(sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13));
  /* The last bit of 0.5 is worth the smallest f16: the sum is rounded to a multiple of that. */
  return (uint16_t)(sign | (phx_private_bits_of_float(phx_private_float_of_bits(magnitude) + 0.5f) - 0x3f000000u));
}
static inline float phx_private_smaller(float a, float x) { /* a NaN if one is; -0 below 0 */
  return a < x || a != a || (a == x && phx_private_bits_of_float(a) >> 31 != 0) ? a : x;
}
static inline float phx_private_larger(float a, float x) { return -phx_private_smaller(-a, -x); }

#define PHX_PRIVATE_SAME(x) (x)
/* The body of a reduction: of `loads` and `form` only CUDA makes something. `combined` is made of a and x. */
#define PHX_PRIVATE_MULTICAST(loads, form, Raw, Acc, widen, narrow, combined) \
  Raw raw[sizeof(phx_pack) / sizeof(Raw)];                                    \
  Acc acc[sizeof(phx_pack) / sizeof(Raw)] = {0};                              \
  phx_pack value;                                                             \
  int32_t rank;                                                               \
  size_t i;                                                                   \
  for (rank = 0; rank < team->group_size; ++rank) {                           \
    memcpy(raw, phx_team_at(team, rank, offset), sizeof raw);                 \
    for (i = 0; i < sizeof raw / sizeof raw[0]; ++i) {                        \
      const Acc x = widen(raw[i]);                                            \
      if (rank == 0) {                                                        \
        acc[i] = x;                                                           \
      } else {                                                                \
        const Acc a = acc[i];                                                 \
        acc[i] = (combined);                                                  \
      }                                                                       \
    }                                                                         \
  }                                                                           \
  for (i = 0; i < sizeof raw / sizeof raw[0]; ++i) raw[i] = narrow(acc[i]);   \
  memcpy(&value, raw, sizeof value);                                          \
  return value

#elif defined(__CUDA_ARCH__)

#define PHX_PRIVATE_LOAD_V4(form)                                                                   \
  asm volatile("multimem.ld_reduce.relaxed.sys.global." form " {%0, %1, %2, %3}, [%4];"             \
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3]) \
               : "l"(at)                                                                            \
               : "memory")
#define PHX_PRIVATE_LOAD_4(form)                                          \
  for (int i = 0; i < 4; ++i)                                             \
  asm volatile("multimem.ld_reduce.relaxed.sys.global." form " %0, [%1];" \
               : "=r"(value.word[i])                                      \
               : "l"(at + 4 * i)                                          \
               : "memory")
#define PHX_PRIVATE_LOAD_2(form)                                                     \
  for (int i = 0; i < 2; ++i)                                                        \
  asm volatile("{\n\t.reg .b64 both;\n\tmultimem.ld_reduce.relaxed.sys.global." form \
               " both, [%2];\n\t"                                                    \
               "mov.b64 {%0, %1}, both;\n\t}"                                        \
               : "=r"(value.word[2 * i]), "=r"(value.word[2 * i + 1])                \
               : "l"(at + 8 * i)                                                     \
               : "memory")
#define PHX_PRIVATE_MULTICAST(loads, form, Raw, Acc, widen, narrow, combined) \
  const char *const at = static_cast<const char *>(team->multicast) + offset; \
  phx_pack value;                                                             \
  PHX_PRIVATE_LOAD_##loads(form);                                             \
  return value

#else /* nvcc's pass for the host, where no kernel runs */

#define PHX_PRIVATE_MULTICAST(loads, form, Raw, Acc, widen, narrow, combined) return phx_pack()

#endif

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/* Blocks and multicast are two addresses of one memory: this goes between what is done by one and by the other, after
 * the barrier where another rank has done the first, and before the barrier where another rank does the second. */
PHX_FN void phx_multicast_fence(void) {
#ifdef __CUDA_ARCH__
  asm volatile("fence.proxy.alias;" ::: "memory");
#endif
}

/* Writes to the blocks of all ranks. */
PHX_FN void phx_multicast_put(const phx_team *team, size_t offset, phx_pack value) {
#ifdef __CUDA_ARCH__
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                   static_cast<char *>(team->multicast) + offset),
               "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
               : "memory");
#elif !defined(__CUDACC__)
  int32_t rank;
  for (rank = 0; rank < team->group_size; ++rank) memcpy(phx_team_at(team, rank, offset), &value, sizeof value);
#endif
}

/* The sum over the blocks of all ranks: of 4 float32, 8 float16, 8 bfloat16, 2 float64; of integers, signed or not. */
PHX_FN phx_pack phx_multicast_sum_f32x4(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(V4, "add.v4.f32", float, float, PHX_PRIVATE_SAME, PHX_PRIVATE_SAME, a + x);
}
PHX_FN phx_pack phx_multicast_sum_f16x8(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(V4, "add.acc::f32.v4.f16x2", uint16_t, float, phx_private_float_of_f16,
                        phx_private_f16_of_float, a + x);
}
PHX_FN phx_pack phx_multicast_sum_bf16x8(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(V4, "add.acc::f32.v4.bf16x2", uint16_t, float, phx_private_float_of_bf16,
                        phx_private_bf16_of_float, a + x);
}
PHX_FN phx_pack phx_multicast_sum_f64x2(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(2, "add.f64", double, double, PHX_PRIVATE_SAME, PHX_PRIVATE_SAME, a + x);
}
PHX_FN phx_pack phx_multicast_sum_u32x4(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(4, "add.u32", uint32_t, uint32_t, PHX_PRIVATE_SAME, PHX_PRIVATE_SAME, a + x);
}
PHX_FN phx_pack phx_multicast_sum_u64x2(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(2, "add.u64", uint64_t, uint64_t, PHX_PRIVATE_SAME, PHX_PRIVATE_SAME, a + x);
}

/* The minimum and maximum. */
PHX_FN phx_pack phx_multicast_min_f16x8(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(V4, "min.v4.f16x2", uint16_t, float, phx_private_float_of_f16, phx_private_f16_of_float,
                        phx_private_smaller(a, x));
}
PHX_FN phx_pack phx_multicast_min_bf16x8(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(V4, "min.v4.bf16x2", uint16_t, float, phx_private_float_of_bf16, phx_private_bf16_of_float,
                        phx_private_smaller(a, x));
}
PHX_FN phx_pack phx_multicast_min_u32x4(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(4, "min.u32", uint32_t, uint32_t, PHX_PRIVATE_SAME, PHX_PRIVATE_SAME, x < a ? x : a);
}
PHX_FN phx_pack phx_multicast_min_i32x4(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(4, "min.s32", int32_t, int32_t, PHX_PRIVATE_SAME, PHX_PRIVATE_SAME, x < a ? x : a);
}
PHX_FN phx_pack phx_multicast_min_u64x2(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(2, "min.u64", uint64_t, uint64_t, PHX_PRIVATE_SAME, PHX_PRIVATE_SAME, x < a ? x : a);
}
PHX_FN phx_pack phx_multicast_min_i64x2(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(2, "min.s64", int64_t, int64_t, PHX_PRIVATE_SAME, PHX_PRIVATE_SAME, x < a ? x : a);
}
PHX_FN phx_pack phx_multicast_max_f16x8(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(V4, "max.v4.f16x2", uint16_t, float, phx_private_float_of_f16, phx_private_f16_of_float,
                        phx_private_larger(a, x));
}
PHX_FN phx_pack phx_multicast_max_bf16x8(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(V4, "max.v4.bf16x2", uint16_t, float, phx_private_float_of_bf16, phx_private_bf16_of_float,
                        phx_private_larger(a, x));
}
PHX_FN phx_pack phx_multicast_max_u32x4(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(4, "max.u32", uint32_t, uint32_t, PHX_PRIVATE_SAME, PHX_PRIVATE_SAME, x > a ? x : a);
}
PHX_FN phx_pack phx_multicast_max_i32x4(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(4, "max.s32", int32_t, int32_t, PHX_PRIVATE_SAME, PHX_PRIVATE_SAME, x > a ? x : a);
}
PHX_FN phx_pack phx_multicast_max_u64x2(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(2, "max.u64", uint64_t, uint64_t, PHX_PRIVATE_SAME, PHX_PRIVATE_SAME, x > a ? x : a);
}
PHX_FN phx_pack phx_multicast_max_i64x2(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(2, "max.s64", int64_t, int64_t, PHX_PRIVATE_SAME, PHX_PRIVATE_SAME, x > a ? x : a);
}

/* Bit by bit, whatever the elements are. */
PHX_FN phx_pack phx_multicast_and_b64x2(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(2, "and.b64", uint64_t, uint64_t, PHX_PRIVATE_SAME, PHX_PRIVATE_SAME, a & x);
}
PHX_FN phx_pack phx_multicast_or_b64x2(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(2, "or.b64", uint64_t, uint64_t, PHX_PRIVATE_SAME, PHX_PRIVATE_SAME, a | x);
}
PHX_FN phx_pack phx_multicast_xor_b64x2(const phx_team *team, size_t offset) {
  PHX_PRIVATE_MULTICAST(2, "xor.b64", uint64_t, uint64_t, PHX_PRIVATE_SAME, PHX_PRIVATE_SAME, a ^ x);
}

#endif /* from sm_90 on */

#undef PHX_PRIVATE_MULTICAST
#undef PHX_PRIVATE_SAME
#undef PHX_PRIVATE_LOAD_V4
#undef PHX_PRIVATE_LOAD_4
#undef PHX_PRIVATE_LOAD_2

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

#endif /* __CUDACC__ */

#endif /* PHALANX_DEVICE_H */
