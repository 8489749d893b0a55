// The collectives of a group on ordinary GPU memory: puts the copies and kernels of a call on its stream.
#pragma once

#include <vector>

#include "ops/call.h"

namespace phx {

// Puts a checked call on its stream.
phx_status put_on_gpu(Call &call, const Volume &volume, phx_work **work);
// Puts the calls of a list on the stream one after the other.
phx_status put_on_gpu(Call &all, const std::vector<CoalescedCall> &calls, phx_work **work);

}  // namespace phx
