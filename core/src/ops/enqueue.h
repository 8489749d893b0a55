// The collectives on symmetric memory of GPUs: which kernel does which call.
#pragma once

#include "ops/call.h"

namespace phx {

// Whether an all_reduce goes beside its flags, and reads no input but this rank's own: alike on all ranks.
bool fits_lines(const Call &call, const Symm &symm);
// Puts a checked call on its stream. root < 0: none.
phx_status enqueue(Call &call, Symm &symm, size_t offset, int root, phx_work **work);
// Those with a count for each rank: of the input, and of the output. The same list, where all ranks have the same.
phx_status enqueue_v(Call &call, Symm &symm, size_t offset, const size_t *in_counts, const size_t *out_counts,
                     phx_work **work);

}  // namespace phx
