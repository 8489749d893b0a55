// What one launch of a kernel gets: the host fills it in, the kernel reads it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "phalanx/phalanx.h"

namespace phx::cuda {

// One launch on one rank.
struct Launch {
  phx_team team;     // its arrays are in memory that the device reads
  size_t offset;     // of the input, into the block of every rank
  void *out;         // ordinary memory of the device; not used in place
  size_t count;      // elements, as in the public call
  size_t begin;      // of what is reduced: 0, or of reduce_scatter the own part
  int32_t root;      // of broadcast; of signals the other rank
  uint32_t channel;  // the first of as many as there are blocks
  int64_t divisor;
  double scale;
  uint64_t timeout_ns;
  uint32_t *taken;   // words as in a pad: signals that this rank has waited for
  uint32_t *failed;  // gets what a wait that failed returned: see phalanx/device.h
};

}  // namespace phx::cuda
