#include "base/interrupt.h"

#include <unistd.h>

#include <cerrno>

#include "base/deadline.h"
#include "base/error.h"
#include "base/long_wait.h"

namespace phx {
namespace {

struct Hook {
  phx_interrupt_fn check = nullptr;
  void *arg = nullptr;
  pid_t pid = 0;          // a forked child inherits this memory, but must not run the hook
  int64_t ask_at_ns = 0;  // the time from which the hook is called again
  bool running = false;
};
thread_local Hook t_hook;

}  // namespace

bool interrupt_requested() {
  Hook &hook = t_hook;
  if (hook.running) return false;
  LongWait::look_at_innermost();
  if (hook.check == nullptr) return false;
  if (now_ns() < hook.ask_at_ns || hook.pid != getpid()) return false;
  const int error_number = errno;
  const KeptError kept;  // the hook may call functions that fail
  hook.running = true;
  running_hooks.fetch_add(1, std::memory_order_relaxed);
  const bool requested = hook.check(hook.arg) != 0;
  running_hooks.fetch_sub(1, std::memory_order_relaxed);
  hook.running = false;
  hook.ask_at_ns = requested ? 0 : now_ns() + kInterruptSliceNs;
  errno = error_number;
  return requested;
}

void set_interrupt_hook(phx_interrupt_fn check, void *arg) {
  t_hook = {check, check == nullptr ? nullptr : arg, getpid(), 0, t_hook.running};
}

bool runs_own_hook() { return t_hook.running; }

phx_status timeout_or_interrupt(const char *operation) {
  if (!interrupt_requested()) return PHX_ERR_TIMEOUT;
  return fail(PHX_ERR_INTERRUPTED, operation, "the wait was interrupted by the hook of phx_set_interrupt");
}

}  // namespace phx
