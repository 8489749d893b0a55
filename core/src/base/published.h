// Values that a group has agreed on, and which can be replaced while calls read them.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>

namespace phx {

template <class Values>
class Published {
 public:
  void publish(const Values &values) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.push_back(values);
    current_.store(&all_.back(), std::memory_order_release);
  }
  const Values &get() const { return *current_.load(std::memory_order_acquire); }

 private:
  std::mutex mutex_;
  std::deque<Values> all_;  // never shrinks: readers take no lock
  std::atomic<const Values *> current_{nullptr};
};

}  // namespace phx
