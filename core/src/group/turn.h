// Locks whose holder may wait for its peers while it holds them: who comes next waits within its own deadline.
#pragma once

#include <algorithm>
#include <chrono>
#include <mutex>

#include "base/interrupt.h"
#include "base/sanitizers.h"
#include "wait/wait.h"

namespace phx {

using TurnMutex = std::timed_mutex;
using Turn = std::unique_lock<TurnMutex>;

inline bool try_turn_for(Turn &turn, int64_t ns) {
#ifdef PHX_SANITIZES_THREADS  // older ones do not see pthread_mutex_clocklock, only the lock by the clock of the wall
  return turn.try_lock_until(std::chrono::system_clock::now() + std::chrono::nanoseconds(ns));
#else
  return turn.try_lock_for(std::chrono::nanoseconds(ns));
#endif
}

// `turn` is deferred. Waits until it is this thread's turn, and moves on what this rank has under way meanwhile. False
// at the deadline. A lock that is free costs no look at the clock.
inline bool take_turn(Turn &turn, LazyDeadline &deadline) {
  constexpr int64_t kSliceNs = 20 * 1000 * 1000, kBusySliceNs = 1000 * 1000;  // between looks at what is under way
  if (turn.try_lock()) return true;
  for (;;) {
    const int64_t slice = deadline.poll() != LazyDeadline::Elsewhere::kNothing ? kBusySliceNs : kSliceNs;
    const int64_t left = deadline.at_ns() - now_ns();
    if (left <= 0 || interrupt_requested()) return turn.try_lock();
    if (try_turn_for(turn, std::min(left, slice))) return true;
  }
}

}  // namespace phx
