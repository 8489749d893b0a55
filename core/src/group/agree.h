// Agreement among the ranks of a group that are alive, over their connections: also where the group has failed.
//
// In rounds, every rank tells all others its opinion (the AND of the bits, and who is absent) and takes theirs in. A
// rank that has died, or says nothing in time, becomes absent. A rank that hears its own opinion from everybody who is
// not absent has the verdict; it tells the others, for whom a rank may have died meanwhile, and who take it over. Every
// further round has one more absent rank, so there are at most as many rounds as ranks, and one.
#pragma once

#include <bitset>

#include "base/deadline.h"
#include "group/control.h"
#include "world/link.h"

namespace phx {

class Group;

// The number of the messages of one round.
inline constexpr uint32_t kRoundBits = 16;
inline uint64_t agreement_ordinal(uint64_t agreement, uint64_t round) {
  return kAgreements | agreement << kRoundBits | round;
}

struct Opinion {
  uint64_t bits;
  uint64_t decided;  // 1: this is the verdict
  std::bitset<kMaxGroupSize> absent;
  bool operator==(const Opinion &o) const { return bits == o.bits && absent == o.absent; }
};

}  // namespace phx
