// How a kernel reports an error: by exception, which torch's boxed call turns into a Python one (std::invalid_argument
// becomes ValueError, any other std::exception RuntimeError). Status and text are also kept for phxt_last_status().
#pragma once

#include <string>

#include "phalanx/phalanx.h"

namespace phxt {

// Remembers the error for phxt_last_status() and phxt_last_error(); returns the status.
phx_status set_error(phx_status status, std::string text);

[[noreturn]] void raise(phx_status status, const std::string &text);
// With the text of this thread's last error in the core.
[[noreturn]] void raise_core(phx_status status);
// With the text that set_error() left.
[[noreturn]] void raise_kept(phx_status status);
// For callers that take no exceptions: runs `body`, and gives what it raises as its status. The text is that of
// set_error().
phx_status status_of_exception() noexcept;  // in a catch block
template <class Body>
phx_status quietly(Body body) noexcept {
  try {
    body();
    return PHX_OK;
  } catch (...) {
    return status_of_exception();
  }
}
// Why torch's last call failed, as far as torch tells.
std::string torch_reason();
// A call of torch failed. `doing` completes "could not ...".
[[noreturn]] void raise_torch(const char *doing);

inline void check_core(phx_status status) {
  if (__builtin_expect(status != PHX_OK, 0)) raise_core(status);
}
inline void check_kept(phx_status status) {
  if (__builtin_expect(status != PHX_OK, 0)) raise_kept(status);
}
inline void check_torch(int error, const char *doing) {
  if (__builtin_expect(error != 0, 0)) raise_torch(doing);
}

}  // namespace phxt
