// The thread's last error, and the exceptions that carry it out of a kernel.
#include "errors.h"

#include <stdexcept>
#include <utility>

#include "optional_shim.h"
#include "phalanx_torch.h"

namespace phxt {
namespace {

struct LastError {
  phx_status status = PHX_OK;
  std::string text;
};
thread_local LastError last_error;

}  // namespace

phx_status set_error(phx_status status, std::string text) {
  last_error.status = status;
  last_error.text = std::move(text);
  return status;
}

void raise(phx_status status, const std::string &text) {
  set_error(status, text);
  if (status == PHX_ERR_INVALID) throw std::invalid_argument(text);
  throw std::runtime_error(text);
}

void raise_core(phx_status status) { raise(status, phx_last_error()); }

void raise_kept(phx_status status) { raise(status, last_error.text); }

std::string torch_reason() {
  const auto what = optional_shim().exception_get_what_without_backtrace;
  if (!what) return "torch has printed the reason";  // before 2.13 there is no call that returns it
  std::string reason = what();
  const size_t traceback = reason.find("\n\nAt:\n");  // of an exception of Python
  return traceback == std::string::npos ? reason : reason.substr(0, traceback);
}

void raise_torch(const char *doing) {
  raise(PHX_ERR_INTERNAL, std::string("phalanx could not ") + doing + ": " + torch_reason());
}

}  // namespace phxt

extern "C" phx_status phxt_last_status(void) { return phxt::last_error.status; }
extern "C" const char *phxt_last_error(void) { return phxt::last_error.text.c_str(); }
