// Reduction and copy kernels. Pure functions on memory: no state, no waiting, no allocation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "phalanx/phalanx.h"

namespace phx::kernels {

// out[i] = in[0][i] op in[1][i] op ... in[n-1][i], in that order, f16 and bf16 accumulated in f32 and rounded once at
// the end (to nearest even). avg divides by `divisor`; premul_sum multiplies each input by `scale` first, in the
// accumulator's type. `out` may be exactly one of the inputs; no other overlap. n >= 1. Bit-identical whatever the
// instruction set.
using ReduceFn = void (*)(void *out, const void *const *in, int n, size_t count, int64_t divisor, double scale);

// NULL when the pair is not defined (bitwise operations on floats, premul_sum on bool, ...).
ReduceFn find_reduce(int32_t dtype, int32_t op);

// For tests: the same from one instruction set ("scalar", "avx2", "avx512"). NULL where this host or build has not got
// it.
ReduceFn find_reduce_isa(const char *isa, int32_t dtype, int32_t op);
const char *active_isa();  // static

}  // namespace phx::kernels
