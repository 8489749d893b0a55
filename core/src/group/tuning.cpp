// phx_group_*_tuning: the values by which a group chooses its algorithms, the same on all its ranks.
#include <algorithm>

#include "base/error.h"
#include "base/guard.h"
#include "base/read_in.h"
#include "group/group.h"

using phx::fail;
using phx::guarded;

namespace phx {

void Group::adopt_tuning(const Tuning &tuning) {
  std::lock_guard<std::mutex> lock(tuning_mutex_);
  tunings_.push_back(tuning);
  tuning_.store(&tunings_.back(), std::memory_order_release);
}

size_t Group::eager_bytes() const {
  // What one round surely takes: whole cache lines for each rank.
  const size_t unit = kLine * size();
  return std::min<size_t>(channels_[0].lane.slot_bytes(), tuning().chunk_bytes) / unit * unit;
}

phx_status Group::agree_tuning(const Tuning &wish, int64_t timeout_ms) {
  const char *operation = "group_set_tuning";
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  std::vector<Parcel> all;
  const phx_status status =
      exchange(operation, std::string(reinterpret_cast<const char *>(&wish), sizeof wish), {}, deadline, &all);
  if (status != PHX_OK) return status;
  Tuning first;
  if (all[0].bytes.size() != sizeof first)
    return fail(PHX_ERR_ABI, operation, "%s on group '%s': rank %d sent a malformed parcel", operation, name().c_str(),
                rank_of(0));
  std::memcpy(&first, all[0].bytes.data(), sizeof first);
  const Tuning merged = merge_tuning(first, builtin_tuning(size(), cores_));
  const phx_status checked = check_tuning(operation, merged);  // alike on all ranks
  if (checked != PHX_OK) return checked;
  adopt_tuning(merged);
  return PHX_OK;
}

}  // namespace phx

extern "C" {

phx_status phx_group_get_tuning(phx_group *group, phx_tuning *out) {
  const char *operation = "group_get_tuning";
  if (group == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: group is NULL", operation);
  const phx::Tuning tuning = group->ptr->tuning();
  const phx_tuning public_form{sizeof(phx_tuning), 0, tuning.one_shot_bytes, tuning.chunk_bytes, tuning.streaming_bytes,
                               tuning.push_bytes};
  return phx::copy_out(public_form, out, operation);
}

phx_status phx_group_set_tuning(phx_group *group, const phx_tuning *tuning, int64_t timeout_ms) {
  const char *operation = "group_set_tuning";
  return guarded(operation, [&]() -> phx_status {
    if (group == nullptr || tuning == nullptr)
      return fail(PHX_ERR_INVALID, operation, "%s: group or tuning is NULL", operation);
    phx_tuning given;
    phx_status status = phx::read_in(tuning, &given, operation);
    if (status == PHX_OK && given.flags != 0)
      status = fail(PHX_ERR_INVALID, operation, "%s: flags must be 0", operation);
    int64_t timeout = 0;
    if (status == PHX_OK) status = group->ptr->world().resolve_timeout(operation, timeout_ms, &timeout);
    if (status != PHX_OK) return status;
    return group->ptr->agree_tuning({given.one_shot_bytes, given.chunk_bytes, given.streaming_bytes, given.push_bytes},
                                    timeout);
  });
}

phx_status phx_group_save_tuning(phx_group *group, const char *path) {
  return guarded("group_save_tuning", [&]() -> phx_status {
    if (group == nullptr) return fail(PHX_ERR_INVALID, "group_save_tuning", "group_save_tuning: group is NULL");
    return phx::save_tuning(path != nullptr ? path : "", group->ptr->size(), group->ptr->tuning());
  });
}
}
