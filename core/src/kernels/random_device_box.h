// What a kernel of a GPU gets to fill a box: see Box. Its dims are joined, and fit the parameters of a launch.
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

// One launch.
struct DeviceFill {
  void *out;
  uint64_t key;
  Settings settings;
  DeviceBox box;
};

}  // namespace phx::random
