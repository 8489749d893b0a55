// Random elements of a tensor: selects the kernel that fills a contiguous range of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "phalanx/random.h"

namespace phx::random {

// The parameters of a kernel besides key and index. Which fields are used depends on the kind.
struct Settings {
  double offset = 0;   // uniform: a, as the dtype has it; normal: the mean
  double scale = 1;    // uniform: b - a, as the dtype has it; normal: the standard deviation; exponential: 1 / the rate
  double bound = 0;    // uniform: the largest value, below b; exponential: the smallest
  uint64_t limit = 0;  // bernoulli: 2^32 * p
  int64_t low = 0;     // integers: the smallest
  uint64_t range = 0;  // integers: how many; 0 stands for 2^64
};

// Kinds for integers, in addition to PHX_RANDOM_*: each is made from 32 random bits, or from 64.
enum { kNarrowIntegers = 100, kWideIntegers = 101 };

// Writes elements `first` to `first + count` of a tensor into contiguous memory. Every instruction set gives the same.
using FillFn = void (*)(void *out, size_t count, uint64_t first, uint64_t key, const Settings &settings);

// NULL when the pair is not defined.
FillFn find_fill(int32_t kind, int32_t dtype);

// For tests: the same of one instruction set. NULL if the host or the build does not have it.
FillFn find_fill_isa(const char *isa, int32_t kind, int32_t dtype);

// One per random_fill_*.cpp. The caller must make sure that the host can execute the kernels.
FillFn find_scalar(int32_t kind, int32_t dtype);
FillFn find_avx2(int32_t kind, int32_t dtype);
FillFn find_avx512(int32_t kind, int32_t dtype);

}  // namespace phx::random
