// The values by which a group chooses its algorithms. They are the same on all its ranks.
#include <algorithm>

#include "group/group.h"
#include "phalanx/tuning.h"

namespace phx {

size_t Group::eager_bytes() const {
  // The size that always fits into one round: whole cache lines for each rank.
  const size_t unit = kLine * size();
  return std::min<size_t>(lanes_[0].slot_bytes(), tuning().chunk_bytes) / unit * unit;
}

phx_status Group::agree_tuning(const Tuning &wish, int64_t timeout_ms) {
  Tuning agreed{};
  const phx_status status = agree_values("group_set_tuning", wish, builtin_tuning(size(), cores_), timeout_ms, &agreed);
  if (status == PHX_OK) tuning_.publish(agreed);
  return status;
}

}  // namespace phx
