// Fills a box of a tensor, row by row.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "kernels/random_device_box.h"

namespace phx::random {

// Where the elements of a box are in the tensor, and where they go; see phx_random_fill.
struct Box {
  uint64_t first;
  int32_t ndim;
  const int64_t *sizes, *index_strides, *out_strides;
};

// PHX_ERR_INVALID if the box or `out` is not valid.
phx_status check_box(const Box &box, const void *out, const char *operation);

// Writes the dims of more than one element to `dims`, and joins neighbours that are one dim both in the tensor and in
// the output. A dim whose elements are consecutive in the tensor comes last, because these share blocks of random
// words. Returns the number of dims, or -1 if the box is empty.
int simplify(const Box &box, Dim *dims);

// Fills a checked box. `size`: bytes of an element.
void fill_box(FillFn fill, void *out, size_t size, uint64_t key, const Settings &settings, const Box &box);

}  // namespace phx::random
