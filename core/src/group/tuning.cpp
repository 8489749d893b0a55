// phx_group_*_tuning: the values by which a group chooses its algorithms, the same on all its ranks.
#include <algorithm>

#include "base/error.h"
#include "base/guard.h"
#include "base/read_in.h"
#include "group/group.h"
#include "phalanx/tuning.h"

using phx::fail;
using phx::guarded;

namespace phx {

size_t Group::eager_bytes() const {
  // What one round surely takes: whole cache lines for each rank.
  const size_t unit = kLine * size();
  return std::min<size_t>(channels_[0].lane.slot_bytes(), tuning().chunk_bytes) / unit * unit;
}

template <class Values>
phx_status Group::agree_values(const char *operation, const Values &wish, const Values &builtin, int64_t timeout_ms,
                               Values *out) {
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  std::vector<Parcel> all;
  const phx_status status =
      exchange(operation, std::string(reinterpret_cast<const char *>(&wish), sizeof wish), {}, deadline, &all);
  if (status != PHX_OK) return status;
  Values first;
  if (all[0].bytes.size() != sizeof first)
    return fail(PHX_ERR_ABI, operation, "%s on group '%s': rank %d sent a malformed parcel", operation, name().c_str(),
                rank_of(0));
  std::memcpy(&first, all[0].bytes.data(), sizeof first);
  *out = merge_tuning(first, builtin);
  return check_tuning(operation, *out);  // alike on all ranks
}

phx_status Group::agree_tuning(const Tuning &wish, int64_t timeout_ms) {
  Tuning agreed;
  const phx_status status = agree_values("group_set_tuning", wish, builtin_tuning(size(), cores_), timeout_ms, &agreed);
  if (status == PHX_OK) tuning_.adopt(agreed);
  return status;
}

phx_status Group::agree_gpu_tuning(const GpuTuning &wish, int64_t timeout_ms) {
  GpuTuning agreed;
  const phx_status status = agree_values("group_set_gpu_tuning", wish, builtin_gpu_tuning(size()), timeout_ms, &agreed);
  if (status != PHX_OK) return status;
  const std::lock_guard<std::mutex> lock(gpu_mutex_);
  gpu_chosen_ = true;
  gpu_tuning_.adopt(agreed);
  return PHX_OK;
}

void Group::meet_on_gpus(const GpuPlace &place, const GpuTuning &of_first) {
  const std::lock_guard<std::mutex> lock(gpu_mutex_);
  gpu_place_ = place;
  if (gpu_chosen_) return;
  gpu_chosen_ = true;
  const ErrorInfo before = last_error();
  const GpuTuning merged = merge_tuning(of_first, builtin_gpu_tuning(size()));
  if (check_tuning("symm_rendezvous", merged) == PHX_OK) {
    gpu_tuning_.adopt(merged);
    return;
  }
  PHX_LOG(PHX_LOG_WARNING,
          "group '%s': the tuning table of rank %d holds what cannot be for GPUs: %s Built-in values are used.",
          name().c_str(), rank_of(0), last_error().text);
  set_last_error(before);
}

phx_status Group::save_gpu_tuning(const char *operation, const std::string &path) {
  const std::lock_guard<std::mutex> lock(gpu_mutex_);
  if (gpu_place_.group_size == 0)
    return fail(
        PHX_ERR_INVALID, operation,
        "%s on group '%s': its ranks have no memory of GPUs in common yet, so it is not known for which GPU the "
        "values are: let them have a rendezvous of some first",
        operation, name().c_str());
  return phx::save_gpu_tuning(path, gpu_place_, gpu_tuning());
}

}  // namespace phx

namespace {

// What is common to calls that give a group values: `agree` gets them, and the timeout that holds.
template <class Values, class Agree>
phx_status set_values(const char *operation, phx_group *group, const Values *values, int64_t timeout_ms,
                      const Agree &agree) {
  return guarded(operation, group, [&]() -> phx_status {
    if (group == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: group is NULL", operation);
    Values given{};
    phx_status status = values == nullptr ? fail(PHX_ERR_INVALID, operation, "%s: tuning is NULL", operation)
                                          : phx::read_in(values, &given, operation);
    if (status == PHX_OK && given.flags != 0)
      status = fail(PHX_ERR_INVALID, operation, "%s: flags must be 0", operation);
    int64_t timeout = 0;
    if (status == PHX_OK) status = group->ptr->resolve_timeout(operation, timeout_ms, &timeout);
    if (status == PHX_OK) return agree(given, timeout);
    phx::amend_last_error(nullptr, group->ptr->name().c_str(), group->ptr->self_rank(), -1);
    return group->ptr->refuse_exchange();
  });
}

}  // namespace

extern "C" {

phx_status phx_group_get_stats(phx_group *group, phx_group_stats *out) {
  const char *operation = "group_get_stats";
  if (group == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: group is NULL", operation);
  if (phx::is_inherited(group)) return phx::refuse_fork(operation, group->ptr->world());
  phx::Group &g = *group->ptr;
  phx_group_stats stats = PHX_GROUP_STATS_INIT;
  stats.eager_bytes = g.eager_bytes();
  for (uint32_t i = 0; i < g.channels(); ++i) stats.zero_copies += g.channel(i).engine.zero_copies();
  return phx::copy_out(stats, out, operation);
}

phx_status phx_group_get_tuning(phx_group *group, phx_tuning *out) {
  const char *operation = "group_get_tuning";
  if (group == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: group is NULL", operation);
  if (phx::is_inherited(group)) return phx::refuse_fork(operation, group->ptr->world());
  const phx::Tuning tuning = group->ptr->tuning();
  const phx_tuning public_form{sizeof(phx_tuning), 0, tuning.one_shot_bytes, tuning.chunk_bytes, tuning.streaming_bytes,
                               tuning.push_bytes};
  return phx::copy_out(public_form, out, operation);
}

phx_status phx_group_set_tuning(phx_group *group, const phx_tuning *tuning, int64_t timeout_ms) {
  return set_values("group_set_tuning", group, tuning, timeout_ms, [&](const phx_tuning &given, int64_t timeout) {
    return group->ptr->agree_tuning({given.one_shot_bytes, given.chunk_bytes, given.streaming_bytes, given.push_bytes},
                                    timeout);
  });
}

phx_status phx_group_save_tuning(phx_group *group, const char *path) {
  return guarded("group_save_tuning", group, [&]() -> phx_status {
    if (group == nullptr) return fail(PHX_ERR_INVALID, "group_save_tuning", "group_save_tuning: group is NULL");
    return phx::save_tuning(path != nullptr ? path : "", group->ptr->size(), group->ptr->tuning());
  });
}

phx_status phx_group_get_gpu_tuning(phx_group *group, phx_gpu_tuning *out) {
  const char *operation = "group_get_gpu_tuning";
  if (group == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: group is NULL", operation);
  if (phx::is_inherited(group)) return phx::refuse_fork(operation, group->ptr->world());
  const phx::GpuTuning tuning = group->ptr->gpu_tuning();
  const phx_gpu_tuning public_form{
      sizeof(phx_gpu_tuning), 0, tuning.line_bytes, tuning.two_shot_bytes, tuning.multicast_bytes, tuning.copy_bytes,
      tuning.thread_bytes};
  return phx::copy_out(public_form, out, operation);
}

phx_status phx_group_set_gpu_tuning(phx_group *group, const phx_gpu_tuning *tuning, int64_t timeout_ms) {
  const auto agree = [&](const phx_gpu_tuning &given, int64_t timeout) {
    return group->ptr->agree_gpu_tuning(
        {given.line_bytes, given.two_shot_bytes, given.multicast_bytes, given.copy_bytes, given.thread_bytes}, timeout);
  };
  return set_values("group_set_gpu_tuning", group, tuning, timeout_ms, agree);
}

phx_status phx_group_save_gpu_tuning(phx_group *group, const char *path) {
  const char *operation = "group_save_gpu_tuning";
  return guarded(operation, group, [&]() -> phx_status {
    if (group == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: group is NULL", operation);
    return group->ptr->save_gpu_tuning(operation, path != nullptr ? path : "");
  });
}
}
