#include "base/long_wait.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "base/environment.h"
#include "base/error.h"

namespace phx {
namespace {

std::string seconds(int64_t ms) {  // "10 s", "0.2 s"
  if (ms >= 10000) return std::to_string(ms / 1000) + " s";
  char text[32];
  std::snprintf(text, sizeof text, "%.2g s", static_cast<double>(ms) / 1000);
  return text;
}

}  // namespace

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
