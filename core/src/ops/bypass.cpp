#include "ops/bypass.h"

namespace phx {
namespace {

using kernels::Copy;
using kernels::CopyUse;

constexpr size_t kOctaves = 4;

// The first call of a try finds the caches as another candidate left them. Large calls are few and take long: the first
// tries come sooner, and less is spent on them.
struct CallContest : kernels::Contest {
  constexpr CallContest() : Contest({/* soon */ 3, /* early */ 4, /* skipped */ 1, /* margin */ 4, /* hopeless */ 2}) {}
};
CallContest contests[kBypassUses][kOctaves];

constexpr uint32_t bit(Copy copy) { return uint32_t{1} << static_cast<uint32_t>(copy); }

// The candidates around the caches, and the first of them.
struct Ways {
  uint32_t candidates;
  uint8_t first;
};
Ways ways_of(BypassUse use) {
  if (use == BypassUse::kExchangeReduce || use == BypassUse::kSymmReduce)
    return {bit(Copy::kStream), static_cast<uint8_t>(Copy::kStream)};  // Reduction::streaming
  const bool exchanges = use == BypassUse::kTwoShot || use == BypassUse::kExchange;
  const CopyUse copies = exchanges ? CopyUse::kExchangeAround : CopyUse::kAroundCache;
  const kernels::CopyContest &of = kernels::copy_contests[static_cast<size_t>(copies)][kernels::kCopyClasses - 1];
  return {of.candidates & ~bit(Copy::kMemcpy), static_cast<uint8_t>(of.first)};
}

}  // namespace

void Bypass::choose(BypassUse use, size_t limit) {
  const size_t octave = bytes_ < limit / 2 ? 0 : bytes_ < limit ? 1 : bytes_ - limit < limit ? 2 : 3;
  const Ways ways = ways_of(use);
  CallContest *const of_use = contests[static_cast<size_t>(use)];
  turn_.candidate = octave < 2 ? 0 : ways.first;
  // A way around the caches that has won for smaller results begins.
  if (const uint8_t smaller = octave == 0 ? 0 : of_use[octave - 1].winner(0); smaller != 0) turn_.candidate = smaller;
  candidates_ = octave == 3 && ways.candidates != 0 ? ways.candidates : ways.candidates | bit(Copy::kMemcpy);
  if ((candidates_ & (candidates_ - 1)) == 0) return;
  contest_ = &of_use[octave];
  turn_ = contest_->next(candidates_, turn_.candidate);
}

}  // namespace phx
