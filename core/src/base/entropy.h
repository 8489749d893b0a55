// Random bytes from the kernel.
#pragma once

#include <cstddef>

namespace phx {

// Fills `data` with unpredictable bytes. False, with errno set, if neither getrandom(2) nor /dev/urandom gives any.
bool fill_random(void *data, size_t size);

}  // namespace phx
