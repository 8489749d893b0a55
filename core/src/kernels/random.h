// Random elements of a tensor: which kernel fills a stretch of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "phalanx/random.h"

namespace phx::random {

// What a kernel needs besides key and index. Which fields hold depends on the kind.
struct Settings {
  double offset = 0;   // a of uniform, the mean of normal; as the dtype has it
  double scale = 1;    // b - a, the standard deviation, 1 / the rate
  double bound = 0;    // uniform: the largest value, below b; exponential: the smallest
  uint64_t limit = 0;  // bernoulli: 2^32 * p
  int64_t low = 0;     // integers: the smallest
  uint64_t range = 0;  // integers: how many; 0 stands for 2^64
};

// Integers as kinds of their own, next to PHX_RANDOM_*: from 32 bits each, or from 64.
enum { kNarrowIntegers = 100, kWideIntegers = 101 };

// Elements `first` to `first + count` of a tensor, into memory without gaps. Bit-identical whatever the instruction
// set.
using FillFn = void (*)(void *out, size_t count, uint64_t first, uint64_t key, const Settings &settings);

// NULL when the pair is not defined.
FillFn find_fill(int32_t kind, int32_t dtype);

// For tests: the same from one instruction set. NULL where host or build has not got it.
FillFn find_fill_isa(const char *isa, int32_t kind, int32_t dtype);

// One per fill_*.cpp. The caller has made sure that the host can execute what they return.
FillFn find_scalar(int32_t kind, int32_t dtype);
FillFn find_avx2(int32_t kind, int32_t dtype);
FillFn find_avx512(int32_t kind, int32_t dtype);

}  // namespace phx::random
