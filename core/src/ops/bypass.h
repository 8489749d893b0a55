// Whether the results of a call are stored around the caches, and how.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/ticks.h"
#include "kernels/copies.h"

namespace phx {

// Each has contests of its own, because their results cost differently.
enum class BypassUse : uint8_t {
  kGather,
  kBroadcast,
  kTwoShot,
  kExchange,
  kExchangeReduce,
  kSymmCopy,
  kSymmReduce,
  kSymmSum,
  kSymmBroadcast,
  kSymmBroadcastRoot,
};
inline constexpr size_t kBypassUses = 10;

// The choice of one call on this rank; peers do not see it.
//
// Large results would push everything else out of the caches, and are gone from there before they are read; small ones
// are found there. Where one ends and the other begins depends on caches that a virtual machine may hide. So results
// from a quarter of the limit (`streaming_bytes`) on have a contest for each octave, and from its double on one between
// the ways around the caches alone. Its turns are whole calls: whether the lines of a result are in a cache depends on
// what the call before did.
class Bypass {
 public:
  // `bytes`: of the results, or of all that is added up to them. `applies`: this rank stores results, and may choose.
  Bypass(BypassUse use, size_t bytes, size_t limit, bool applies = true) : bytes_(bytes) {
    if (applies && bytes != 0 && bytes >= limit / 4) choose(use, limit);
  }
  Bypass(const Bypass &) = delete;
  Bypass &operator=(const Bypass &) = delete;
  ~Bypass() {
    if (contest_ != nullptr && ticks_ != 0) contest_->took(turn_, (ticks_ << 10) / bytes_, candidates_);
  }

  explicit operator bool() const { return turn_.candidate != 0; }
  // The candidate that makes the copies. kMemcpy: the winner of the contest of copies that stay in the caches.
  kernels::Copy copy() const { return static_cast<kernels::Copy>(turn_.candidate); }

  // Lives as long as the call moves data.
  class Clock {
   public:
    explicit Clock(Bypass &of) : of_(of), begin_(of.turn_.is_timed ? ticks() : 0) {}
    Clock(const Clock &) = delete;
    Clock &operator=(const Clock &) = delete;
    ~Clock() {
      if (of_.turn_.is_timed) of_.ticks_ += ticks() - begin_;
    }

   private:
    Bypass &of_;
    const uint64_t begin_;
  };

 private:
  void choose(BypassUse use, size_t limit);

  const size_t bytes_;
  uint32_t candidates_ = 0;
  kernels::Contest *contest_ = nullptr;
  kernels::Contest::Turn turn_{};
  uint64_t ticks_ = 0;
};

}  // namespace phx
