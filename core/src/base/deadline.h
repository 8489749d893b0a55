// Deadlines on the monotonic clock. Every blocking wait of the library takes one.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <mutex>

#include "base/interrupt.h"

namespace phx {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

class Deadline {
 public:
  static constexpr int64_t kMaxMs = int64_t{1} << 40;  // 34 years, the longest wait: keeps the sum in range
  static Deadline after_ms(int64_t ms) { return Deadline(ms, now_ns() + clamp(ms) * 1000000); }

  // A deadline in `ms` from now for a part of this wait; errors still name the budget of the whole wait.
  Deadline part(int64_t ms) const { return Deadline(budget_ms_, after_ms(ms).at_ns_); }

  // Also true if the hook of the calling thread asks for an interruption, which ends a wait in the same way.
  bool passed() const { return now_ns() >= at_ns_ || interrupt_requested(); }
  int64_t at_ns() const { return at_ns_; }
  int64_t budget_ms() const { return budget_ms_; }  // as requested, for error texts
  int64_t left_ns() const {
    const int64_t left = at_ns_ - now_ns();
    return left > 0 ? left : 0;
  }
  // Rounded up, so that a poll() with it does not return just before the end.
  int64_t left_ms() const { return (left_ns() + 999999) / 1000000; }
  // How long to sleep before the next call of passed(): the time left, but at most one slice.
  int64_t slice_ns() const { return left_ns() < kInterruptSliceNs ? left_ns() : kInterruptSliceNs; }
  int slice_ms() const { return static_cast<int>((slice_ns() + 999999) / 1000000); }

 private:
  Deadline(int64_t budget_ms, int64_t at_ns) : at_ns_(at_ns), budget_ms_(budget_ms) {}
  static int64_t clamp(int64_t ms) { return ms < 0 ? 0 : (ms > kMaxMs ? kMaxMs : ms); }

  int64_t at_ns_;
  int64_t budget_ms_;
};

// Waits on a condition variable in slices, between which the thread's interrupt hook runs (base/interrupt.h).
//
// Returns whether `ready` became true by the deadline. `ready` is called with the lock held: at first, after each
// notification of `changed`, and after each slice. The lock is released while the hook runs, which may run any code.
template <class Ready>
bool wait_until(std::condition_variable &changed, std::unique_lock<std::mutex> &lock, const Deadline &deadline,
                Ready ready) {
  int64_t ask_at_ns = now_ns() + kInterruptSliceNs;
  while (!ready()) {
    const auto end = std::chrono::nanoseconds(std::min(deadline.at_ns(), ask_at_ns));
    if (changed.wait_until(lock, std::chrono::steady_clock::time_point(end)) != std::cv_status::timeout) continue;
    lock.unlock();
    const bool passed = deadline.passed();
    lock.lock();
    if (passed) return ready();
    ask_at_ns = now_ns() + kInterruptSliceNs;
  }
  return true;
}

}  // namespace phx
