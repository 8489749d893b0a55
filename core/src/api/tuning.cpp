// phx_group_*_tuning: the values by which a group chooses its algorithms, the same on all its ranks.
#include "phalanx/tuning.h"
#include "base/error.h"
#include "base/guard.h"
#include "base/read_in.h"
#include "gpu/gpu_group.h"
#include "group/group.h"
#include "ops/collectives.h"

using phx::fail;
using phx::guarded;

namespace {

template <class Values>
phx_status get(const char *operation, phx_group *group, typename Values::Public *out,
               const Values &(*values)(phx::Group &)) {
  if (group == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: group is NULL", operation);
  if (phx::is_inherited(group)) return phx::refuse_fork(operation, group->ptr->world());
  return phx::copy_out(phx::public_tuning(values(*group->ptr)), out, operation);
}

// `agree` gets the values, and the timeout that holds.
template <class Values, class Agree>
phx_status set(const char *operation, phx_group *group, const typename Values::Public *values, int64_t timeout_ms,
               const Agree &agree) {
  return guarded(operation, group, [&]() -> phx_status {
    if (group == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: group is NULL", operation);
    typename Values::Public given{};
    phx_status status = values == nullptr ? fail(PHX_ERR_INVALID, operation, "%s: tuning is NULL", operation)
                                          : phx::read_in(values, &given, operation);
    if (status == PHX_OK && given.flags != 0)
      status = fail(PHX_ERR_INVALID, operation, "%s: flags must be 0", operation);
    int64_t timeout = 0;
    if (status == PHX_OK) status = group->ptr->resolve_timeout(operation, timeout_ms, &timeout);
    if (status == PHX_OK) return agree(phx::private_tuning<Values>(given), timeout);
    phx::amend_last_error(nullptr, group->ptr->name().c_str(), group->ptr->self_rank(), -1);
    return group->ptr->refuse_exchange();
  });
}

// `write` gets the path; "" means the usual place.
template <class Write>
phx_status save(const char *operation, phx_group *group, const char *path, const Write &write) {
  return guarded(operation, group, [&]() -> phx_status {
    if (group == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: group is NULL", operation);
    return write(path != nullptr ? path : "");
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
  for (uint32_t i = 0; i < g.channels(); ++i) stats.zero_copies += phx::collectives_of(g).engine(i).zero_copies();
  return phx::copy_out(stats, out, operation);
}

phx_status phx_group_get_tuning(phx_group *group, phx_tuning *out) {
  return get<phx::Tuning>("group_get_tuning", group, out,
                          [](phx::Group &g) -> const phx::Tuning & { return g.tuning(); });
}

phx_status phx_group_set_tuning(phx_group *group, const phx_tuning *tuning, int64_t timeout_ms) {
  return set<phx::Tuning>("group_set_tuning", group, tuning, timeout_ms, [&](const phx::Tuning &wish, int64_t timeout) {
    return group->ptr->agree_tuning(wish, timeout);
  });
}

phx_status phx_group_save_tuning(phx_group *group, const char *path) {
  return save("group_save_tuning", group, path,
              [&](const char *to) { return phx::save_tuning(to, group->ptr->size(), group->ptr->tuning()); });
}

phx_status phx_group_get_gpu_tuning(phx_group *group, phx_gpu_tuning *out) {
  return get<phx::GpuTuning>("group_get_gpu_tuning", group, out,
                             [](phx::Group &g) -> const phx::GpuTuning & { return phx::gpu_of(g).tuning(); });
}

phx_status phx_group_set_gpu_tuning(phx_group *group, const phx_gpu_tuning *tuning, int64_t timeout_ms) {
  return set<phx::GpuTuning>("group_set_gpu_tuning", group, tuning, timeout_ms,
                             [&](const phx::GpuTuning &wish, int64_t timeout) {
                               return phx::gpu_of(*group->ptr).agree_tuning(wish, timeout);
                             });
}

phx_status phx_group_save_gpu_tuning(phx_group *group, const char *path) {
  constexpr const char *kOperation = "group_save_gpu_tuning";
  return save(kOperation, group, path,
              [&](const char *to) { return phx::gpu_of(*group->ptr).save_tuning(kOperation, to); });
}
}
