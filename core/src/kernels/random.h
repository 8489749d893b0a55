// Random elements of a tensor: selects the kernel that fills a contiguous range of them, and fills a box row by row.
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

// In scalar.cpp and random_fill_*.cpp. The caller must make sure that the host can execute the kernels.
FillFn find_scalar(int32_t kind, int32_t dtype);
FillFn find_avx2(int32_t kind, int32_t dtype);
FillFn find_avx512(int32_t kind, int32_t dtype);

// Where the elements of a box are in the tensor, and where they go; see phx_random_fill.
struct Box {
  uint64_t first;
  int32_t ndim;
  const int64_t *sizes, *index_strides, *out_strides;
};

// PHX_ERR_INVALID if the box or `out` is not valid.
phx_status check_box(const Box &box, const void *out, const char *operation);

constexpr int kMaxDims = 64;

struct Dim {
  int64_t size, index_stride, out_stride;
};

// Writes the dims of more than one element to `dims`, and joins neighbours that are one dim both in the tensor and in
// the output. A dim whose elements are consecutive in the tensor comes last, because these share blocks of random
// words. Returns the number of dims, or -1 if the box is empty.
int simplify(const Box &box, Dim *dims);

// Fills a checked box. `size`: bytes of an element.
void fill_box(FillFn fill, void *out, size_t size, uint64_t key, const Settings &settings, const Box &box);

// The parameters with which a GPU kernel fills a box. The dims come from `simplify`, and the whole fits the parameters
// of a launch.
struct DeviceFill {
  void *out;
  uint64_t key;
  Settings settings;
  uint64_t first;
  int64_t count;  // elements
  int32_t ndim;
  Dim dims[kMaxDims];
};

}  // namespace phx::random
