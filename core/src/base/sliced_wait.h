// Waits on a condition variable until a deadline, in slices, between which the thread's hook is asked
// (base/interrupt.h).
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "base/deadline.h"

namespace phx {

class SlicedWait {
 public:
  explicit SlicedWait(const Deadline &deadline) : deadline_(deadline), look_at_ns_(now_ns() + kInterruptSliceNs) {}

  // Sleeps until `changed` is notified or a slice is over. Returns whether the deadline has passed; for that look the
  // lock is released, because the hook may run anything.
  bool passed_after(std::condition_variable &changed, std::unique_lock<std::mutex> &lock) {
    const int64_t until = std::min(deadline_.at_ns(), look_at_ns_);
    const auto end = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(until));
    if (changed.wait_until(lock, end) != std::cv_status::timeout) return false;
    lock.unlock();
    const bool passed = deadline_.passed();
    lock.lock();
    look_at_ns_ = now_ns() + kInterruptSliceNs;
    return passed;
  }

 private:
  const Deadline deadline_;
  int64_t look_at_ns_;
};

}  // namespace phx
