// phx_group_*_tuning: the values by which a group chooses its algorithms. They are the same on all its ranks.
#include "phalanx/tuning.h"
#include "api/entry.h"
#include "base/tuning.h"
#include "gpu/gpu_group.h"
#include "ops/engine.h"

using phx::fail;
using phx::with_handle;

namespace {

template <class Values>
phx_status get(const char *operation, phx_group *group, typename Values::Public *out,
               const Values &(*values)(phx::Group &)) {
  return with_handle(operation, group, [&](phx::Group &g) {  //
    return phx::copy_out(phx::public_tuning(values(g)), out, operation);
  });
}

// Calls agree(group, values, resolved timeout in ms).
template <class Values, class Agree>
phx_status set(const char *operation, phx_group *group, const typename Values::Public *values, int64_t timeout_ms,
               const Agree &agree) {
  return with_handle(operation, group, [&](phx::Group &g) -> phx_status {
    typename Values::Public copy{};
    phx_status status =
        values == nullptr ? fail(PHX_ERR_INVALID, operation, "tuning is NULL") : phx::read_in(values, &copy, operation);
    if (status == PHX_OK && copy.flags != 0) status = fail(PHX_ERR_INVALID, operation, "flags must be 0");
    int64_t timeout = 0;
    if (status == PHX_OK) status = g.resolve_timeout(operation, timeout_ms, &timeout);
    return status == PHX_OK ? agree(g, phx::private_tuning<Values>(copy), timeout) : g.refuse_exchange();
  });
}

}  // namespace

extern "C" {

phx_status phx_group_get_stats(phx_group *group, phx_group_stats *out) {
  const char *operation = "group_get_stats";
  return with_handle(operation, group, [&](phx::Group &g) {
    phx_group_stats stats = PHX_GROUP_STATS_INIT;
    stats.eager_bytes = g.eager_bytes();
    for (uint32_t i = 0; i < g.channels(); ++i) stats.zero_copies += phx::collectives_of(g).engine(i).zero_copies();
    return phx::copy_out(stats, out, operation);
  });
}

phx_status phx_group_get_tuning(phx_group *group, phx_tuning *out) {
  return get<phx::Tuning>("group_get_tuning", group, out,
                          [](phx::Group &g) -> const phx::Tuning & { return g.tuning(); });
}

phx_status phx_group_set_tuning(phx_group *group, const phx_tuning *tuning, int64_t timeout_ms) {
  return set<phx::Tuning>(
      "group_set_tuning", group, tuning, timeout_ms,
      [](phx::Group &g, const phx::Tuning &wish, int64_t timeout) { return g.agree_tuning(wish, timeout); });
}

phx_status phx_group_save_tuning(phx_group *group, const char *path) {  // NULL: to tuning_path()
  return with_handle("group_save_tuning", group, [&](phx::Group &g) {
    return phx::save_tuning(path != nullptr ? path : "", g.size(), g.tuning());
  });
}

const char *phx_tuning_host(void) { return phx::tuning_host().c_str(); }

phx_status phx_group_get_gpu_tuning(phx_group *group, phx_gpu_tuning *out) {
  return get<phx::GpuTuning>("group_get_gpu_tuning", group, out,
                             [](phx::Group &g) -> const phx::GpuTuning & { return phx::gpu_of(g).tuning(); });
}

phx_status phx_group_set_gpu_tuning(phx_group *group, const phx_gpu_tuning *tuning, int64_t timeout_ms) {
  return set<phx::GpuTuning>("group_set_gpu_tuning", group, tuning, timeout_ms,
                             [](phx::Group &g, const phx::GpuTuning &wish, int64_t timeout) {
                               return phx::gpu_of(g).agree_tuning(wish, timeout);
                             });
}

phx_status phx_group_save_gpu_tuning(phx_group *group, const char *path) {
  const char *operation = "group_save_gpu_tuning";
  return with_handle(operation, group,
                     [&](phx::Group &g) { return phx::gpu_of(g).save_tuning(operation, path != nullptr ? path : ""); });
}
}
