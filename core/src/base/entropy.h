// Random bytes from the kernel.
#pragma once

#include <cstddef>

#include "phalanx/phalanx.h"

namespace phx {

// Fills `data` with at most 256 unpredictable bytes. Fails, with the error of getrandom(2), if neither that nor
// /dev/urandom gives any.
phx_status fill_random(const char *operation, void *data, size_t size);

}  // namespace phx
