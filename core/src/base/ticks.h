// The clock of the flight recorder: the processor's counter if it has one constant rate on all cores, because reading
// it costs a third of reading the kernel's clock; otherwise the latter. All processes of a host make the same choice.
#pragma once

#include <cstdint>

#include "base/deadline.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace phx {

#if defined(__x86_64__)
extern const bool kCountsEvenly;
inline uint64_t ticks() { return kCountsEvenly ? __rdtsc() : static_cast<uint64_t>(now_ns()); }
#elif defined(__aarch64__)
inline uint64_t ticks() {
  uint64_t count;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  return count;
}
#else
inline uint64_t ticks() { return static_cast<uint64_t>(now_ns()); }
#endif

// Converts ticks to nanoseconds of CLOCK_MONOTONIC.
class TickScale {
 public:
  TickScale();  // sleeps for 1 ms if begin_tick_scale ran less than 1 ms ago
  int64_t ns(uint64_t at) const;

 private:
  uint64_t ticks_;
  int64_t ns_;
  double ns_per_tick_;
};

// Reads both clocks for the first of the two readings of a scale. The first world of the process calls it.
void begin_tick_scale();

}  // namespace phx
