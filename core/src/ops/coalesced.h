// Several calls as one operation.
#pragma once

#include <vector>

#include "ops/operation.h"

namespace phx {

// In bytes: what this rank reads and writes in a call, and the largest input of any rank, which is the same on all.
struct Volume {
  size_t in = 0, out = 0, largest = 0;
};

// A checked call of a list. Its kind is one that phx_call allows.
struct CoalescedCall {
  Buffers buffers;
  Reduction reduction;
  CallRecord record;
  Volume volume;
  Kind kind() const { return kind_of(record); }
  int root() const { return record.root; }
};

// Copies inputs of at most `limit` bytes into `copies`, because the caller may change them when the start returns.
void keep_inputs(std::vector<CoalescedCall> *calls, size_t limit, std::vector<char> *copies);

OperationPtr make_coalesced(const Plan &plan, const std::vector<CoalescedCall> &calls);

}  // namespace phx
