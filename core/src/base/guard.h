// The boundary between C++ and C: no exception crosses it.
#pragma once

#include <exception>
#include <new>

#include "base/error.h"
#include "base/interrupt.h"

namespace phx {

// Runs `body` (which returns a phx_status) and turns what it throws into an error of `operation`.
template <class Body>
phx_status guarded(const char *operation, Body &&body) noexcept {
  try {
    const phx_status status = body();
    return status == PHX_ERR_TIMEOUT ? timeout_or_interrupt(operation) : status;
  } catch (const std::bad_alloc &) {
    return fail(PHX_ERR_NO_MEMORY, operation, "%s: out of memory", operation);
  } catch (const std::exception &error) {
    return fail(PHX_ERR_INTERNAL, operation, "%s: %s", operation, error.what());
  }
}

}  // namespace phx
