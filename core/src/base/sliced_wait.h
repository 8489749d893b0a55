// Waits on a condition variable until a deadline, in slices, between which the thread's hook is asked
// (base/interrupt.h).
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "base/deadline.h"

namespace phx {

// Whether `ready` has become true by the deadline. It is called with the lock held: at first, after each notification
// of `changed`, and once the deadline has passed. The lock is released while the hook is asked, because that may run
// anything.
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
