// A collective on ordinary buffers whose input happens to lie in symmetric memory: then nothing is copied.
#pragma once

#include "ops/call.h"

namespace phx {

inline constexpr size_t kSmallestInput = size_t{4} << 10;
// Whether inputs of so many bytes are worth looking for.
bool pays_to_look(const Group &group, size_t in_bytes);
// Where an input lies, if collectives of the group should read it there. NULL: they copy it.
std::shared_ptr<Symm> find_input(const Group &group, const void *in, size_t in_bytes);
// Whether an input of as many bytes on another rank may be read there. What is found out later may still be that not.
bool may_find_input(const Group &group, size_t in_bytes);

// What to do instead of `staged`, if anything. `in_bytes`: of the input of a rank that has one. `root`: as in the call.
// in_counts and out_counts: of all_to_all_v.
//
// Whether the inputs of the others lie there as well is seen when all have arrived: see zero_copy.cpp. If they are not
// in one allocation, `staged` is done after all.
OperationPtr with_zero_copy(const Call &call, size_t in_bytes, OperationPtr staged, bool blocking, int root = -1,
                            const size_t *in_counts = nullptr, const size_t *out_counts = nullptr);
OperationPtr coalesced_with_zero_copy(const Call &call, const Plan &plan, const std::vector<CoalescedCall> &calls);

}  // namespace phx
