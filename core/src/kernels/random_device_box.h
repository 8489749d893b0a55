// The parameters with which a GPU kernel fills a box (see Box). The dims come from `simplify`, and the whole fits the
// parameters of a launch.
#pragma once

#include "kernels/random.h"

namespace phx::random {

constexpr int kMaxDims = 64;

struct Dim {
  int64_t size, index_stride, out_stride;
};

struct DeviceBox {
  uint64_t first;
  int64_t count;  // elements
  int32_t ndim;
  Dim dims[kMaxDims];
};

// The parameters of one launch.
struct DeviceFill {
  void *out;
  uint64_t key;
  Settings settings;
  DeviceBox box;
};

}  // namespace phx::random
