// Arithmetic that all collectives share, and the barrier, which moves nothing.
#include "ops/operation.h"

#include <algorithm>

#include "group/lane.h"
#include "symm/symm.h"

namespace phx {

size_t Plan::chunk_bytes() const { return std::min<size_t>(lane.slot_bytes(), tuning.chunk_bytes); }
size_t Plan::chunk_elements(size_t item) const { return elements_in(chunk_bytes(), item); }

size_t Plan::pipelined_elements(size_t bytes, size_t item) const {
  // An additional barrier must pay for itself; one_shot_bytes says how many bytes a barrier is worth.
  if (bytes / 16 < tuning.one_shot_bytes) return chunk_elements(item);
  return std::min(chunk_elements(item), part_elements(bytes / item, item, 2));
}

namespace {

class Barrier final : public Operation {
 public:
  Barrier() : Operation({}, 0) { reach = 0; }
  void put(const Lane &, uint32_t, uint64_t) override {}
  phx_status take(const Lane &, uint32_t, uint64_t) override { return PHX_OK; }
};

}  // namespace

OperationPtr make_barrier() { return std::make_unique<Barrier>(); }

}  // namespace phx
