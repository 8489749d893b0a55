// Locks whose holder may wait for its peers while it holds them: who comes next waits within its own deadline.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/wait.h"

namespace phx {

// A mutex that can be waited for until a time of the monotonic clock. One word, in line: it is taken and left in every
// collective, and std::timed_mutex costs twice as much there.
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
  void unlock() {
    if (word_.exchange(kFree, std::memory_order_release) == kAwaited) wake_all(word_);
  }

 private:
  static constexpr uint32_t kFree = 0, kHeld = 1, kAwaited = 2;  // kAwaited: held, and somebody may sleep for it
  SharedWord word_{kFree};
};
using Turn = std::unique_lock<TurnMutex>;

// take_turn, once the lock is known to be held.
bool await_turn(Turn &turn, LazyDeadline &deadline);

// `turn` is deferred. Waits until it is this thread's turn, and moves on what this rank has under way meanwhile. False
// at the deadline. A lock that is free costs no look at the clock.
inline bool take_turn(Turn &turn, LazyDeadline &deadline) { return turn.try_lock() || await_turn(turn, deadline); }

}  // namespace phx
