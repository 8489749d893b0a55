// A box of a tensor as stretches of elements that follow each other.
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

// PHX_ERR_INVALID when it makes no sense.
phx_status check_box(const Box &box, const void *out, const char *operation);

// The dims of more than one element, joined where they run on in each other. One whose elements follow each other in
// the tensor comes last, since these share blocks. Returns their number, or -1 if the box is empty.
int simplify(const Box &box, Dim *dims);

// Fills a box that was checked. `size` is that of an element, in bytes.
void fill_box(FillFn fill, void *out, size_t size, uint64_t key, const Settings &settings, const Box &box);

}  // namespace phx::random
