// Several calls as one operation.
#pragma once

#include <vector>

#include "collectives/operation.h"

namespace phx {

// One of them, checked. kind: one of those of phx_call.
struct CoalescedCall {
  Kind kind = Kind::kNone;
  Buffers buffers;
  Reduction reduction;
  int root = -1;
  CallRecord record;
};

OperationPtr make_coalesced(const Plan &plan, const std::vector<CoalescedCall> &calls);

}  // namespace phx
