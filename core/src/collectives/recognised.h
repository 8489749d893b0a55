// A collective on ordinary buffers whose input happens to lie in symmetric memory: then nothing is copied.
#pragma once

#include "collectives/call.h"

namespace phx {

// Where an input lies, if collectives of the group should read it there. NULL: they copy it.
std::shared_ptr<Symm> find_input(const Group &group, const void *in, size_t in_bytes);

// What to do instead of `staged`, if anything. `in`: this rank's input, of in_bytes.
//
// Whether the inputs of the others lie there as well is seen when all have arrived: each says where its input lies
// (Place) and puts nothing into its slot yet. If they are not in one allocation, `staged` is done after all.
OperationPtr recognise(const Call &call, Kind kind, size_t in_bytes, OperationPtr staged, bool blocking, int root = -1);
// all_gather_v and reduce_scatter_v, with the counts of all ranks.
OperationPtr recognise_v(const Call &call, Kind kind, size_t in_bytes, OperationPtr staged, bool blocking,
                         const size_t *counts);
OperationPtr recognise_all_to_all_v(const Call &call, size_t in_bytes, OperationPtr staged, bool blocking,
                                    const size_t *in_counts, const size_t *out_counts);

}  // namespace phx
