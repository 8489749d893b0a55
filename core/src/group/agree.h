// Agreement among the living ranks of a group over their connections, which works even if the group has failed.
//
// In each round every rank sends its vote (the AND of the bits, and which ranks are absent) to all others and merges
// theirs into it. A rank that has died, or sends nothing in time, becomes absent. A rank that receives its own vote
// from all ranks that are not absent has the decision. It sends the decision to the others, which adopt it: they may
// lack it because a rank died meanwhile. Every further round has one more absent rank, which limits the rounds to one
// more than the ranks.
#pragma once

#include <bitset>

#include "base/deadline.h"
#include "group/control.h"
#include "world/link.h"

namespace phx {

class Group;

// The ordinal of the messages of one round.
inline constexpr uint32_t kRoundBits = 16;
inline uint64_t agreement_ordinal(uint64_t agreement, uint64_t round) {
  return kAgreements | agreement << kRoundBits | round;
}

struct Vote {
  uint64_t bits;
  uint64_t decided;  // 1: this is the decision
  std::bitset<kMaxGroupSize> absent;
  bool operator==(const Vote &o) const { return bits == o.bits && absent == o.absent; }
};

}  // namespace phx
