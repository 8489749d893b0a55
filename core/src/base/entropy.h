// Random bytes of the kernel.
#pragma once

#include <cstddef>

namespace phx {

// Not guessable. False, with errno: the system gives none, neither by getrandom(2) nor from /dev/urandom.
bool fill_random(void *data, size_t size);

}  // namespace phx
