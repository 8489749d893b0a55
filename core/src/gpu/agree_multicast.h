// The last steps of a rendezvous of memory of GPUs: one address for the blocks of all ranks, where the GPUs can.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "gpu/side.h"

namespace phx {

// Collective. Where it cannot be done on one rank, all go without, and `side` says why: that is no failure. It fails
// where the group does. `all`: by group rank.
phx_status agree_on_multicast(const char *operation, Group &group, const Block &block, cuda::Side &side,
                              const std::vector<cuda::Facts> &all, const Deadline &deadline);

}  // namespace phx
