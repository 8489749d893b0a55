// Waits on a condition variable in slices, between which the thread's interrupt hook runs (base/interrupt.h).
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "base/deadline.h"

namespace phx {

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
