// The clock of every time that `phalanx bench` reports.
#pragma once

#include <cstdint>
#include <ctime>

namespace phxb {

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000 + static_cast<uint64_t>(t.tv_nsec);
}

// The compiler may move no memory access across this.
inline void fence() { asm volatile("" ::: "memory"); }

}  // namespace phxb
