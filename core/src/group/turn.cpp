#include "group/turn.h"

namespace phx {

bool TurnMutex::try_lock_for_ns(int64_t ns) {
  const int64_t until = now_ns() + ns;
  for (int64_t left = ns;;) {
    // From here on the holder wakes this thread when it unlocks. A thread that gets the lock here keeps the mark,
    // because others may still sleep.
    if (word_.exchange(kAwaited, std::memory_order_acquire) == kFree) return true;
    if (left <= 0) return false;
    sleep_while(word_, kAwaited, left);
    left = until - now_ns();
  }
}

bool await_turn(Turn &turn, LazyDeadline &deadline) {
  const auto look = [&] { return turn.owns_lock() || turn.try_lock() ? WaitResult::kReached : WaitResult::kNothing; };
  const auto sleep = [&](int64_t ns) {
    if (turn.mutex()->try_lock_for_ns(ns)) turn = Turn(*turn.mutex(), std::adopt_lock);
  };
  return sleep_in_slices(deadline, look, sleep) == WaitResult::kReached;
}

}  // namespace phx
