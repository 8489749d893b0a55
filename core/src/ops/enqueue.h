// The collectives on symmetric memory of GPUs: chooses the kernel for a call and launches it.
#pragma once

#include "ops/call.h"

namespace phx {

// Whether an all_reduce uses the LL protocol, in which a rank reads no input but its own. The same on all ranks.
bool fits_lines(const Call &call, const Symm &symm);
// Puts a checked call on its stream. root < 0: none.
phx_status enqueue(Call &call, Symm &symm, size_t offset, int root, phx_work **work);
// The same for collectives with one count per rank. A list that is the same on all ranks is in_counts and out_counts.
phx_status enqueue_v(Call &call, Symm &symm, size_t offset, const size_t *in_counts, const size_t *out_counts,
                     phx_work **work);

}  // namespace phx
