// Locks whose holder may wait for its peers while it holds them, so the next thread waits only until its own deadline.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/wait.h"

namespace phx {

// A mutex whose wait can end at a time of the monotonic clock. Its functions are inline, because every collective
// locks and unlocks it: std::timed_mutex costs twice as much there. Unlocking takes no locked instruction
// (store_and_wake).
class TurnMutex {
 public:
  TurnMutex() = default;
  TurnMutex(const TurnMutex &) = delete;
  TurnMutex &operator=(const TurnMutex &) = delete;

  // Pairs with the release in unlock(): what the last holder wrote is visible.
  bool try_lock() {
    uint32_t expected = kFree;
    return word_.compare_exchange_strong(expected, kHeld, std::memory_order_acquire, std::memory_order_relaxed);
  }
  bool try_lock_for_ns(int64_t ns);
  void lock() {
    while (!try_lock() && !try_lock_for_ns(1000000000)) {
    }
  }
  void unlock() { store_and_wake(word_, kFree, sleepers_, fences_are_allowed()); }

 private:
  static constexpr uint32_t kFree = 0, kHeld = 1;
  SharedWord word_{kFree}, sleepers_{0};
};
using Turn = std::unique_lock<TurnMutex>;

// The slow path of take_turn, for a lock that is held.
bool await_turn(Turn &turn, LazyDeadline &deadline);

// Locks `turn`, which is deferred, and advances pending operations of this rank while it waits. False at the deadline.
// Taking a free lock does not read the clock.
inline bool take_turn(Turn &turn, LazyDeadline &deadline) { return turn.try_lock() || await_turn(turn, deadline); }

}  // namespace phx
