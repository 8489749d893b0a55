// Several calls as one operation.
#pragma once

#include <vector>

#include "ops/operation.h"

namespace phx {

// One of them, checked. kind: one of those of phx_call.
struct CoalescedCall {
  Kind kind = Kind::kNone;
  Buffers buffers;
  Reduction reduction;
  int root = -1;
  CallRecord record;
};

// How many bytes a call of a list reads on rank `self` of a group of n ranks.
size_t input_bytes(const CoalescedCall &call, int n, int self);
// The caller may change its inputs when the start returns: copies those of at most `limit` bytes into `kept`.
void keep_inputs(std::vector<CoalescedCall> *calls, int n, int self, size_t limit, std::vector<char> *kept);

OperationPtr make_coalesced(const Plan &plan, const std::vector<CoalescedCall> &calls);

}  // namespace phx
