// Several calls as one operation.
#pragma once

#include <vector>

#include "ops/operation.h"

namespace phx {

// A checked call of a list. `kind` is one that phx_call allows.
struct CoalescedCall {
  Kind kind = Kind::kNone;
  Buffers buffers;
  Reduction reduction;
  int root = -1;
  CallRecord record;
};

// How many bytes a call of a list reads on rank `self` of a group of n ranks.
size_t input_bytes(const CoalescedCall &call, int n, int self);
// Copies inputs of at most `limit` bytes into `copies`, because the caller may change them when the start returns.
void keep_inputs(std::vector<CoalescedCall> *calls, int n, int self, size_t limit, std::vector<char> *copies);

OperationPtr make_coalesced(const Plan &plan, const std::vector<CoalescedCall> &calls);

}  // namespace phx
