// The clock of the flight recorder: the processor's counter where it runs evenly and alike on all cores, as reading it
// costs a third of what the kernel's clock costs; that one elsewhere. One host, one choice.
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

// Ticks as nanoseconds of CLOCK_MONOTONIC.
class TickScale {
 public:
  TickScale();  // takes a millisecond if the process is younger than that
  int64_t ns(uint64_t at) const;

 private:
  uint64_t ticks_;
  int64_t ns_;
  double ns_per_tick_;
};

// The earlier of the two readings of both clocks that a scale is made from: by the first world of the process.
void begin_tick_scale();

}  // namespace phx
