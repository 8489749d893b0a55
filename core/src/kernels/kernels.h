// Reduction kernels. Pure functions on memory: no state, no waiting, no allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "phalanx/phalanx.h"

namespace phx::kernels {

// out[i] = in[0][i] op in[1][i] op ... in[n-1][i], in that order. `out` may be exactly one of the inputs; no other
// overlap. Any alignment. n >= 1, divisor >= 1. Bit-identical whatever the instruction set:
//   - f16, bf16 and f8 accumulate in f32 and round once at the end, to nearest even; f32 and f64 accumulate in their
//     own type. Values that are too large become infinity, or 448 in f8e4m3, which has no infinity, as in torch.
//   - avg divides the sum by `divisor`; premul_sum first multiplies each input by `scale`, in the accumulator's type.
//   - A NaN result is always the same NaN (positive, quiet, no payload; 0x7f in both kinds of f8, as in torch), also
//     when n is 1. min and max propagate NaN and treat -0 as less than +0, so that they do not depend on the order of
//     their inputs.
//   - A complex number is two floats, in each of which a NaN becomes this NaN. prod is (ac - bd) + (ad + bc)i as
//     written, each operation rounded; avg and premul_sum divide and multiply both parts.
//   - Integers wrap around; avg divides the wrapped sum, towards zero.
//   - bool: sum, max and bor are `or`; prod, min and band are `and`; any byte but 0 is true; results are 0 or 1.
using ReduceFn = void (*)(void *out, const void *const *in, int n, size_t count, int64_t divisor, double scale);

// How results are written. kStored: to `out`. kStreamed: to `out`, with stores that bypass the caches, for results that
// these would lose before they are read; as kStored if the call is small, the output is not aligned to its elements, or
// the processor has no such stores. Later stores are not reordered before them. kIntoAll: over every input; all inputs
// must be writable and must not overlap, and `out` is not used.
enum class Results { kStored, kStreamed, kIntoAll };

// NULL when the pair is not defined (bitwise operations on floats; premul_sum on integers; avg and premul_sum on bool;
// min, max and bitwise operations on complex numbers).
ReduceFn find_reduce(int32_t dtype, int32_t op, Results results = Results::kStored);

// For tests: the same kernels of one instruction set ("scalar", "avx2", "avx512", "neon"). NULL if the host or the
// build does not have it.
ReduceFn find_reduce_isa(const char *isa, int32_t dtype, int32_t op, Results results = Results::kStored);
const char *active_isa();   // a static string
std::string isa_problem();  // what is wrong with PHALANX_ISA, for a warning; empty: nothing

}  // namespace phx::kernels
