// Reduction kernels. Pure functions on memory: no state, no waiting, no allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "phalanx/phalanx.h"

namespace phx::kernels {

enum class Copy : uint8_t;  // copies.h

// out[i] = in[0][i] op in[1][i] op ... in[n-1][i], in that order. `out` may be exactly one of the inputs; no other
// overlap. Any alignment. n >= 1, divisor >= 1. Bit-identical whatever the instruction set:
//   - f16, bf16 and f8 accumulate in f32 and round once at the end, to nearest even; f32 and f64 accumulate in their
//   own
//     type. Values that are too large become infinity, or 448 in f8e4m3, which has no infinity, as in torch.
//   - avg divides the sum by `divisor`; premul_sum first multiplies each input by `scale`, in the accumulator's type.
//   - A NaN result is always the same NaN (positive, quiet, no payload; 0x7f in both kinds of f8, as in torch), also
//     when n is 1. min and max propagate NaN and treat -0 as less than +0, so that they do not depend on the order of
//     their inputs.
//   - A complex number is two floats, in each of which a NaN becomes this NaN. prod is (ac - bd) + (ad + bc)i as
//     written, each operation rounded; avg and premul_sum divide and multiply both parts.
//   - Integers wrap around; avg divides the wrapped sum, towards zero.
//   - bool: sum, max and bor are `or`; prod, min and band are `and`; any byte but 0 is true; results are 0 or 1.
using ReduceFn = void (*)(void *out, const void *const *in, int n, size_t count, int64_t divisor, double scale);

// NULL when the pair is not defined (bitwise operations on floats; premul_sum on integers; avg and premul_sum on bool;
// min, max and bitwise operations on complex numbers).
ReduceFn find_reduce(int32_t dtype, int32_t op);

// The same results, written with stores that bypass the caches, for results that these would lose before they are read.
// Falls back to the kernel of find_reduce if the call is small, the output is not aligned to its elements, or the
// processor has no such stores. Its stores are ordered before later ones.
ReduceFn find_reduce_streaming(int32_t dtype, int32_t op);

// The same results, written over every input. All inputs must be writable and must not overlap; `out` is not used.
ReduceFn find_reduce_into_all(int32_t dtype, int32_t op);

// For tests: the same kernels of one instruction set ("scalar", "avx2", "avx512", "neon"). NULL if the host or the
// build does not have it.
ReduceFn find_reduce_isa(const char *isa, int32_t dtype, int32_t op);
ReduceFn find_reduce_streaming_isa(const char *isa, int32_t dtype, int32_t op);
ReduceFn find_reduce_into_all_isa(const char *isa, int32_t dtype, int32_t op);
const char *active_isa();   // a static string
std::string isa_problem();  // what is wrong with PHALANX_ISA, for a warning; empty: nothing

// Asks this core to move lines that it has just written to the cache that all cores share. Does nothing on processors
// without the instruction: x86 processors treat it as a no-operation.
inline void demote([[maybe_unused]] const void *at, [[maybe_unused]] size_t size) {
#if defined(__x86_64__)
  const char *line = static_cast<const char *>(at);
  for (const char *const end = line + size; line < end; line += 64) asm volatile("cldemote %0" : : "m"(*line));
#endif
}

// Copies of kSmallCopyBytes and more, with whatever is fastest for the use at the moment (copies.h).
void copy_wide(void *to, const void *from, size_t size);
void put(void *to, const void *from, size_t size);  // into a slot
// The same for memory that one rank writes again and again and others only read, while it stays in the cache.
void put_one_way(void *to, const void *from, size_t size);
void copy_one_way(void *to, const void *from, size_t size);
// The same with stores that bypass the cache if that is faster: for results that would not stay there until read.
void copy_streaming(void *to, const void *from, size_t size);
// The same by this candidate; kPages, which serves exchanges: by the widest stores.
void copy_around(Copy copy, void *to, const void *from, size_t size);
// Copies `slot` to `out` and `next` to `slot`, whose lines this core owns from then on. next NULL: the slot keeps its
// data. `around`: the candidate that stores to `out` around the caches; kMemcpy: none. The three must not overlap.
void exchange(void *out, void *slot, const void *next, size_t size, Copy around);
// For tests: the bytes that this thread has copied with the functions above.
extern thread_local size_t copied_bytes;

}  // namespace phx::kernels
