// Deadlines on the monotonic clock, the hook that a thread sets to end its own waits before them, for example at
// Ctrl-C, and the report of long waits in the log. Every blocking wait of the library takes a deadline.
//
// A wait sleeps in slices and calls the hook between them, through Deadline::passed() or directly. An interrupted wait
// ends as if its time were over; timeout_or_interrupt then reports the interruption.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <string>

#include "phalanx/phalanx.h"

namespace phx {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// The longest sleep between two checks of the deadline, so that the hook is called often enough.
inline constexpr int64_t kInterruptSliceNs = int64_t{100} * 1000000;

// Whether the calling thread's hook ends its waits; false if it has none. Calls the hook at most every 100 ms while it
// returns 0, and each time once it has returned another value. Also reports the wait in the log where it has become
// long. The caller must hold no lock that Python code may need.
bool interrupt_requested();
// Sets the hook of this thread; NULL removes it.
void set_interrupt_hook(phx_interrupt_fn check, void *arg);

// How many threads are inside their hooks: while it is 0, calls need not read their thread's own hook.
inline std::atomic<int> running_hooks{0};
bool runs_own_hook();
// Whether the calling thread is inside its hook. Then it must not wait again: it holds the locks of the outer wait.
inline bool in_interrupt_hook() {
  return __builtin_expect(running_hooks.load(std::memory_order_relaxed) != 0, 0) && runs_own_hook();
}

// The status of `operation` whose wait ended early: PHX_ERR_INTERRUPTED, with an error recorded, if the hook asks for
// it, and otherwise PHX_ERR_TIMEOUT.
phx_status timeout_or_interrupt(const char *operation);

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

// Waits on a condition variable in slices, between which the thread's interrupt hook runs.
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

// ---- long waits: "rank 0: still waiting for rank 3 on group 'tp': all_reduce (10 s of 300 s)" in the log, when
// PHALANX_WAIT_WARNING_S says
//
// interrupt_requested(), which every wait calls between its slices, looks at the innermost LongWait of its thread. So
// only a wait that sleeps pays for it.

// Describes a wait: "rank 0: still waiting for rank 3 on group 'tp': all_reduce". Refers to a function object that
// outlives it, and is called on the thread that waits. An empty result: nothing is reported.
class WaitText {
 public:
  WaitText() = default;
  template <class Text>
  explicit WaitText(const Text &text)
      : object_(&text), call_([](const void *object) { return (*static_cast<const Text *>(object))(); }) {}
  explicit operator bool() const { return call_ != nullptr; }
  std::string operator()() const { return call_(object_); }

 private:
  const void *object_ = nullptr;
  std::string (*call_)(const void *object) = nullptr;
};

// A wait whose owner calls look() now and then.
class WaitReport {
 public:
  WaitReport(const WaitText &text, const Deadline &deadline)
      : WaitReport(text, deadline.at_ns(), deadline.budget_ms()) {}
  WaitReport(const WaitText &text, int64_t at_ns, int64_t budget_ms);
  void look();  // logs a line if one is due

 private:
  int64_t lines_due() const;

  const WaitText text_;
  const int64_t begin_ns_, budget_ms_;
  int64_t lines_;  // that were due already
};

// A wait of this thread, while it lives.
class LongWait : public WaitReport {
 public:
  template <class... Args>
  explicit LongWait(const WaitText &text, Args... args) : WaitReport(text, args...), outer_(innermost_) {
    if (text) innermost_ = this;
  }
  LongWait(const LongWait &) = delete;
  LongWait &operator=(const LongWait &) = delete;
  ~LongWait() { innermost_ = outer_; }
  static void look_at_innermost() {
    if (innermost_ != nullptr) innermost_->look();
  }

 private:
  LongWait *const outer_;
  static thread_local LongWait *innermost_;
};

}  // namespace phx
