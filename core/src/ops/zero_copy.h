// Collectives on ordinary buffers whose inputs happen to lie in symmetric memory, where peers read them without a copy.
#pragma once

#include "ops/call.h"

namespace phx {

inline constexpr size_t kSmallestInput = size_t{4} << 10;
// The symmetric memory in which an input lies, if collectives of the group should read it there. NULL: they copy it.
std::shared_ptr<Symm> find_input(const Group &group, const void *in, size_t in_bytes);
// Whether an input of `in_bytes` on another rank can perhaps be read where it lies. This is a hint: the read may still
// turn out to be impossible.
bool may_find_input(const Group &group, size_t in_bytes);

// The operation to run instead of `staged`, or `staged` itself. `in_bytes`: the size of the input on a rank that has
// one.
//
// Whether the inputs of the other ranks lie in the same allocation is known when all have arrived (see zero_copy.cpp).
// If they do not, `staged` runs after all.
OperationPtr with_zero_copy_of_large(const Call &call, const Plan &plan, size_t in_bytes, OperationPtr staged);
inline OperationPtr with_zero_copy(const Call &call, const Plan &plan, size_t in_bytes, OperationPtr staged) {
  return in_bytes < kSmallestInput ? std::move(staged)
                                   : with_zero_copy_of_large(call, plan, in_bytes, std::move(staged));
}
// The same for a list of calls.
OperationPtr coalesced_with_zero_copy(const Call &call, const Plan &plan, const std::vector<CoalescedCall> &calls);

}  // namespace phx
