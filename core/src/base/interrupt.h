// The hook that a thread sets to end its own waits before their deadline, for example at Ctrl-C.
//
// A wait sleeps in slices and calls the hook between them, through Deadline::passed() or directly. An interrupted wait
// ends as if its time were over; timeout_or_interrupt then reports the interruption.
#pragma once

#include <atomic>
#include <cstdint>

#include "phalanx/phalanx.h"

namespace phx {

// The longest sleep between two checks of the deadline, so that the hook is called often enough.
inline constexpr int64_t kInterruptSliceNs = int64_t{100} * 1000000;

// Whether the calling thread's hook ends its waits; false if it has none. Calls the hook at most every 100 ms while it
// returns 0, and each time once it has returned another value. Also reports the wait in the log where it has become
// long (base/long_wait.h). The caller must hold no lock that Python code may need.
bool interrupt_requested();
// Sets the hook of this thread; NULL removes it.
void set_interrupt_hook(phx_interrupt_fn check, void *arg);

// How many threads are inside their hooks: while it is 0, calls need not read their thread's own hook.
inline std::atomic<int> running_hooks{0};
bool runs_own_hook();
// Whether the calling thread is inside its hook. Then it must not wait again: it holds the locks of the outer wait.
inline bool in_interrupt_hook() {
  return __builtin_expect(running_hooks.load(std::memory_order_relaxed) != 0, 0) && runs_own_hook();
}

// The status of `operation` whose wait ended early: PHX_ERR_INTERRUPTED, with an error recorded, if the hook asks for
// it, and otherwise PHX_ERR_TIMEOUT.
phx_status timeout_or_interrupt(const char *operation);

}  // namespace phx
