// Properties of the processor that decide how its caches are used best.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/sanitizers.h"

namespace phx {

inline bool is_amd() {
#if defined(__x86_64__)
  static const bool amd = __builtin_cpu_is("amd") != 0;
  return amd;
#else
  return false;
#endif
}

// Whether `rep movsb` is the fastest copy of large blocks: it takes ownership of the cache lines that it fills without
// fetching them, and prefetches far ahead. Measured on AMD's Zen 5 (family 1Ah). Others use the loops measured on them.
inline bool has_fast_strings() {
#if defined(__x86_64__) && !defined(PHX_SANITIZED)  // sanitizers do not see the accesses of inline assembly
  static const bool fast = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!is_amd() || __get_cpuid(1, &a, &b, &c, &d) == 0) return false;
    const unsigned base = a >> 8 & 15, family = base == 15 ? base + (a >> 20 & 255) : base;
    const unsigned short_moves = 1u << 4;  // FSRM
    return family >= 0x1a && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & short_moves) != 0;
  }();
  return fast;
#else
  return false;
#endif
}

}  // namespace phx
