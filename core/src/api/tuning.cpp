// phx_group_*_tuning: the values by which a group chooses its algorithms, the same on all its ranks.
#include "base/error.h"
#include "base/guard.h"
#include "base/read_in.h"
#include "gpu/gpu_group.h"
#include "group/group.h"

using phx::fail;
using phx::guarded;

namespace {

// What is common to calls that give a group values: `agree` gets them, and the timeout that holds.
template <class Values, class Agree>
phx_status set_values(const char *operation, phx_group *group, const Values *values, int64_t timeout_ms,
                      const Agree &agree) {
  return guarded(operation, group, [&]() -> phx_status {
    if (group == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: group is NULL", operation);
    Values given;
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
  const phx::GpuTuning tuning = phx::gpu_of(*group->ptr).tuning();
  const phx_gpu_tuning public_form{
      sizeof(phx_gpu_tuning), 0, tuning.line_bytes, tuning.two_shot_bytes, tuning.multicast_bytes, tuning.copy_bytes,
      tuning.thread_bytes};
  return phx::copy_out(public_form, out, operation);
}

phx_status phx_group_set_gpu_tuning(phx_group *group, const phx_gpu_tuning *tuning, int64_t timeout_ms) {
  const auto agree = [&](const phx_gpu_tuning &given, int64_t timeout) {
    return phx::gpu_of(*group->ptr)
        .agree_tuning(
            {given.line_bytes, given.two_shot_bytes, given.multicast_bytes, given.copy_bytes, given.thread_bytes},
            timeout);
  };
  return set_values("group_set_gpu_tuning", group, tuning, timeout_ms, agree);
}

phx_status phx_group_save_gpu_tuning(phx_group *group, const char *path) {
  const char *operation = "group_save_gpu_tuning";
  return guarded(operation, group, [&]() -> phx_status {
    if (group == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: group is NULL", operation);
    return phx::gpu_of(*group->ptr).save_tuning(operation, path != nullptr ? path : "");
  });
}
}
