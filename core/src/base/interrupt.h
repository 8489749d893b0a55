// What ends a wait of a thread before its deadline: the hook that the thread itself has set, such as one for Ctrl-C.
//
// A wait sleeps in slices and asks between them, through Deadline::passed() or directly. An interrupted wait ends as if
// its time were over; who reports a timeout reports the interruption instead.
#pragma once

#include <atomic>
#include <cstdint>

#include "phalanx/phalanx.h"

namespace phx {

// The longest sleep between two looks at the deadline, so that the hook is asked often enough.
inline constexpr int64_t kInterruptSliceNs = int64_t{100} * 1000000;

// Whether the calling thread's hook ends its waits. Asks the hook at most every 100 ms while it says no, and each time
// while it says yes. Threads without a hook get false at once. The caller holds no lock that Python code may need.
bool interrupt_requested();
// The hook of this thread; NULL: none.
void set_interrupt_hook(phx_interrupt_fn check, void *arg);

// How many threads are inside their hooks, so that calls need not look at the thread's own.
inline std::atomic<int> running_hooks{0};
bool runs_own_hook();
// Whether the calling thread is inside its hook. Then it must not wait again: it holds the locks of the outer wait.
inline bool in_interrupt_hook() {
  return __builtin_expect(running_hooks.load(std::memory_order_relaxed) != 0, 0) && runs_own_hook();
}

// The status of a call of `operation` whose wait has timed out: PHX_ERR_INTERRUPTED, with a text, where the hook is
// why.
phx_status timeout_or_interrupt(const char *operation);

}  // namespace phx
