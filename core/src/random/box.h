// A box of a tensor as stretches of elements that follow each other.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "random/random.h"

namespace phx::random {

// Where the elements of a box are in the tensor, and where they go; see phx_random_fill.
struct Box {
  uint64_t first;
  int32_t ndim;
  const int64_t *sizes, *index_strides, *out_strides;
};

// PHX_ERR_INVALID when it makes no sense.
phx_status check_box(const Box &box, const void *out, const char *operation);

// Fills a box that was checked. `size` is that of an element, in bytes.
void fill_box(FillFn fill, void *out, size_t size, uint64_t key, const Settings &settings, const Box &box);

}  // namespace phx::random
