#include "group/turn.h"

#include <algorithm>

#include "base/interrupt.h"

namespace phx {

bool TurnMutex::try_lock_for_ns(int64_t ns) {
  const int64_t until = now_ns() + ns;
  for (int64_t left = ns;;) {
    // From here on the holder wakes this thread; whoever takes the lock so marks it for those who may still sleep.
    if (word_.exchange(kAwaited, std::memory_order_acquire) == kFree) return true;
    if (left <= 0) return false;
    sleep_while(word_, kAwaited, left);
    left = until - now_ns();
  }
}

bool await_turn(Turn &turn, LazyDeadline &deadline) {
  constexpr int64_t kSliceNs = 20 * 1000 * 1000, kBusySliceNs = 1000 * 1000;  // between looks at what is under way
  for (;;) {
    const int64_t slice = deadline.poll() != LazyDeadline::Elsewhere::kNothing ? kBusySliceNs : kSliceNs;
    const int64_t left = deadline.at_ns() - now_ns();
    if (left <= 0 || interrupt_requested()) return turn.try_lock();
    if (turn.mutex()->try_lock_for_ns(std::min(left, slice))) {
      turn = Turn(*turn.mutex(), std::adopt_lock);
      return true;
    }
  }
}

}  // namespace phx
