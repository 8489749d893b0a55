// What the processor is, where that decides how to use its caches.
#pragma once

namespace phx {

inline bool is_amd() {
#if defined(__x86_64__)
  static const bool amd = __builtin_cpu_is("amd") != 0;
  return amd;
#else
  return false;
#endif
}

}  // namespace phx
