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

// What to do instead of `staged`, if anything. `in`: this rank's input, of in_bytes.
//
// Whether the inputs of the others lie there as well is seen when all have arrived: each says where its input lies
// (Place) and puts nothing into its slot yet. If they are not in one allocation, `staged` is done after all.
OperationPtr recognise(const Call &call, size_t in_bytes, OperationPtr staged, bool blocking, int root = -1);
OperationPtr recognise_all_to_all_v(const Call &call, size_t in_bytes, OperationPtr staged, bool blocking,
                                    const size_t *in_counts, const size_t *out_counts);
// Of broadcast and scatter, where the root alone has an input, of in_bytes. (recognised_root.cpp)
OperationPtr recognise_root(const Call &call, size_t in_bytes, OperationPtr staged, bool blocking, int root);
// Of several calls those that can. (recognised_list.cpp)
OperationPtr recognise_list(const Call &call, const Plan &plan, const std::vector<CoalescedCall> &calls);

}  // namespace phx
