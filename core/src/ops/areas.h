// Operations on large inputs: two-shot reductions, and pairwise exchange through shared cache lines.
#pragma once

#include "ops/blocks.h"

namespace phx {

// The most elements of a part of a chunk, of which a slot has one for each rank. Ranks that share cores share a
// second-level cache, too: there, unless the results of a call go around it, three quarters of a chunk are faster.
inline size_t largest_part(const Plan &plan, size_t item, size_t bytes) {
  const bool smaller = plan.lane.ranks_share_cores() && bytes < plan.tuning.streaming_bytes / 4;
  const size_t chunk = smaller ? plan.chunk_bytes() / 4 * 3 : plan.chunk_bytes();
  return std::max(elements_in(chunk / plan.lane.group_size(), item), kLine / item);
}

// Moves chunks through two areas of the slots, which alternate. A cache line of an area carries input to a peer, and
// then the peer's data back. There is one more round than there are chunks, because the data that comes back for a
// chunk is fetched in the round in which the next chunk has arrived.
class ThroughAreas : public Operation {
 public:
  // With more than two chunks this keeps using the slots of its first two epochs, which would count as free otherwise.
  bool exclusive() const override { return chunks_ > 2; }

 protected:
  // `count` elements are moved in chunks. A chunk has `parts` parts of whole cache lines; a slot has room for one part
  // for each rank. all: the elements that a rank gives to all others together, the same on all ranks.
  ThroughAreas(const Plan &plan, const Buffers &buffers, size_t count, size_t all, size_t in_bytes, int parts)
      : Operation(buffers, in_bytes), n_(plan.lane.group_size()), self_(plan.lane.group_rank()) {
    const size_t line = kLine / b_.item, most = largest_part(plan, b_.item, all * b_.item) * parts;
    const size_t chunks = std::max<size_t>(1, (count + most - 1) / most);  // of equal size
    part_ = std::max(std::min(most / parts, part_elements((count + chunks - 1) / chunks, b_.item, parts)), line);
    chunks_ = rounds_for(count, part_ * parts);
    rounds = chunks_ + 1;
    reach = n_ * part_ * b_.item;
  }
  char *area(const Lane &lane, int group_rank, uint32_t chunk, int part = 0) const {
    return lane.data(group_rank, first_epoch + chunk % 2) + part * part_ * b_.item;
  }

  const int n_, self_;
  size_t part_;  // elements
  uint32_t chunks_;
};

// Whether an exchange is faster than the plain form (put all blocks into the slot, then take from all slots) for calls
// in which a rank sends `bytes` to each peer.
bool exchange_pays(const Plan &plan, size_t bytes);
// all_to_all, also with unequal blocks, and all_gather of two ranks. `largest`: the elements of the largest block that
// any rank sends, the same on all ranks.
OperationPtr make_exchange(const Plan &plan, const Buffers &buffers, size_t largest, Blocks &&in, Blocks &&out);
OperationPtr make_exchange_reduce(const Plan &plan, const Buffers &buffers, Blocks &&in, const Reduction &reduction);

}  // namespace phx
