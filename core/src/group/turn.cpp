#include "group/turn.h"

namespace phx {

bool TurnMutex::try_lock_for_ns(int64_t ns) {
  const int64_t until = now_ns() + ns;
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  fence_others();  // see store_and_wake
  bool locked = try_lock();
  for (int64_t left = ns; !locked && left > 0; left = until - now_ns()) {
    sleep_while(word_, kHeld, left);
    locked = try_lock();
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return locked;
}

bool await_turn(Turn &turn, LazyDeadline &deadline) {
  const auto look = [&] { return turn.owns_lock() || turn.try_lock() ? WaitResult::kReached : WaitResult::kNothing; };
  const auto sleep = [&](int64_t ns) {
    if (turn.mutex()->try_lock_for_ns(ns)) turn = Turn(*turn.mutex(), std::adopt_lock);
  };
  return sleep_in_slices(deadline, look, sleep) == WaitResult::kReached;
}

}  // namespace phx
