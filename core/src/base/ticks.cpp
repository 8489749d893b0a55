#include "base/ticks.h"

#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace phx {
namespace {

struct Reading {
  uint64_t ticks;
  int64_t ns;
};

Reading read_both() {
  const uint64_t before = ticks();
  const int64_t ns = now_ns();
  return {before + (ticks() - before) / 2, ns};
}

const Reading &first_reading() {
  static const Reading first = read_both();
  return first;
}

}  // namespace

#if defined(__x86_64__)
const bool kCountsEvenly = [] {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d & 1u << 8) != 0;  // "invariant TSC"
}();
#endif

void begin_tick_scale() { first_reading(); }

TickScale::TickScale() {
  const Reading &first = first_reading();
  Reading now = read_both();
  if (now.ns - first.ns < 1000000) {
    usleep(1000);
    now = read_both();
  }
  ticks_ = now.ticks;
  ns_ = now.ns;
  ns_per_tick_ = static_cast<double>(now.ns - first.ns) / static_cast<double>(now.ticks - first.ticks);
}

int64_t TickScale::ns(uint64_t at) const {
  return ns_ + static_cast<int64_t>(static_cast<double>(static_cast<int64_t>(at - ticks_)) * ns_per_tick_);
}

}  // namespace phx
