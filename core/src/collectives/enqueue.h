// The collectives on symmetric memory of GPUs: which kernel does which call.
#pragma once

#include "collectives/call.h"

namespace phx {

// Puts a checked call on its stream. root < 0: none.
phx_status enqueue(Call &call, Symm &symm, size_t offset, int root, phx_work **work);

}  // namespace phx
