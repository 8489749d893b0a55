#include "base/deadline.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "base/environment.h"
#include "base/error.h"

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

std::string seconds(int64_t ms) {  // "10 s", "0.2 s"
  if (ms >= 10000) return std::to_string(ms / 1000) + " s";
  char text[32];
  std::snprintf(text, sizeof text, "%.2g s", static_cast<double>(ms) / 1000);
  return text;
}

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

// ---- the log of long waits

thread_local LongWait *LongWait::innermost_ = nullptr;

WaitReport::WaitReport(const WaitText &text, int64_t at_ns, int64_t budget_ms)
    : text_(text),
      begin_ns_(at_ns - std::min(budget_ms, Deadline::kMaxMs) * 1000000),
      budget_ms_(budget_ms),
      lines_(lines_due()) {}

// After the first interval, after 3 and 6 of them, and then after every 6.
int64_t WaitReport::lines_due() const {
  const int64_t interval = wait_warning_ns();
  const int64_t waited = now_ns() - begin_ns_;
  if (interval == 0 || waited < interval) return 0;
  return waited < 3 * interval ? 1 : 2 + waited / (6 * interval);
}

void WaitReport::look() {
  if (!logs(PHX_LOG_WARNING)) return;
  const int64_t due = lines_due();
  if (due <= lines_) return;
  lines_ = due;
  const int error_number = errno;
  const KeptError kept;
  const std::string text = text_();
  if (!text.empty())
    PHX_LOG(PHX_LOG_WARNING, "%s (%s of %s)", text.c_str(), seconds((now_ns() - begin_ns_) / 1000000).c_str(),
            seconds(budget_ms_).c_str());
  errno = error_number;
}

}  // namespace phx
