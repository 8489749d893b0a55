// Implements phx_group_*.
#include <algorithm>
#include <cstring>
#include <functional>

#include "api/entry.h"
#include "base/hash.h"
#include "gpu/gpu_group.h"
#include "group/attempt.h"
#include "net/net.h"
#include "ops/engine.h"
#include "p2p/messenger.h"
#include "symm/table.h"

using namespace phx;

namespace {

constexpr size_t kMaxName = 255;

// Creates the attachments of every group.
Attachments attach_all(Group &group) {
  return {std::make_unique<SymmTable>(group, &cuda::GpuSymm::make),
          std::make_unique<GpuGroup>(group),
          std::make_unique<Net>(group),
          std::make_unique<Messenger>(group),
          std::make_unique<Windows>(group),
          std::make_unique<Collectives>(group)};
}

phx_status check_name(const char *operation, const char *name) {
  if (name == nullptr || *name == '\0')
    return fail(PHX_ERR_INVALID, operation, "name is NULL or empty; a group needs a name");
  if (std::strlen(name) > kMaxName)
    return fail(PHX_ERR_INVALID, operation, "the name of the group has more than %zu bytes; shorten it", kMaxName);
  return PHX_OK;
}

phx_status check_size(const char *operation, const char *name, int32_t size) {
  if (size < 1)
    return fail_text(PHX_ERR_INVALID, operation, "%s '%s': the group has %d ranks; it needs at least 1", operation,
                     name, size);
  if (size > kMaxGroupSize)
    return fail_text(PHX_ERR_UNSUPPORTED, operation, "%s '%s': the group has %d ranks; at most %d are supported",
                     operation, name, size, kMaxGroupSize);
  return PHX_OK;
}

phx_status check_ranks(const char *operation, const World &world, const char *name, const int32_t *ranks, int32_t count,
                       int *self) {
  if (ranks == nullptr) return fail_text(PHX_ERR_INVALID, operation, "%s '%s': ranks is NULL", operation, name);
  *self = -1;
  for (int32_t i = 0; i < count; ++i) {
    if (ranks[i] < 0 || ranks[i] >= world.size())
      return fail_text(PHX_ERR_INVALID, operation,
                       "%s '%s': rank %d does not exist in a world of %d ranks; give world ranks from 0 on", operation,
                       name, ranks[i], world.size());
    if (std::find(ranks, ranks + i, ranks[i]) != ranks + i)
      return fail_text(PHX_ERR_INVALID, operation, "%s '%s': rank %d is listed twice; list each rank once", operation,
                       name, ranks[i]);
    if (ranks[i] == world.rank()) *self = i;
  }
  if (*self < 0)
    return fail_text(PHX_ERR_INVALID, operation,
                     "%s '%s': this rank, %d, is not in the list of ranks; only members of a group may create it",
                     operation, name, world.rank());
  return PHX_OK;
}

phx_status read_options(const char *operation, const phx_group_options *options, GroupParams *params) {
  if (options == nullptr) return PHX_OK;
  phx_group_options read = PHX_GROUP_OPTIONS_INIT;
  const phx_status status = read_in(options, &read, operation);
  params->reduction_order = read.reduction_order;
  return status;
}

// `status`: the result of checking the arguments that do not identify the group. A refused call also takes the number
// of an attempt, so that the others can read in the store why this rank gave up.
phx_status make(phx_world *world, const char *operation, GroupParams params, phx_status status, int64_t timeout_ms,
                phx_group **out) {
  World &w = *world->ptr;
  params.attach = &attach_all;
  int64_t timeout = 0;
  if (status == PHX_OK && out == nullptr) status = fail(PHX_ERR_INVALID, operation, "out is NULL");
  if (status == PHX_OK) status = w.resolve_timeout(operation, timeout_ms, &timeout);
  params.attempt = w.next_attempt(params.name_key, &params.first_failed);
  params.key = params.key_of(params.attempt);
  const std::string name_key = params.name_key;
  const uint64_t attempt = params.attempt;
  if (status != PHX_OK) {
    w.note_failed_attempt(name_key, attempt);
    if (params.store) Attempt(w, params.store.get(), params.key).give_up({w.record()});
    return status;
  }
  std::shared_ptr<Group> group;
  status = Group::create(world->ptr, std::move(params), timeout, &group);
  if (status != PHX_OK) {
    w.note_failed_attempt(name_key, attempt);
    return status;
  }
  *out = new phx_group{{1}, std::move(group)};
  return PHX_OK;
}

// `agrees`: whether the call begins with an agreement, and not with an exchange.
template <class Derive>
phx_status derive(const char *operation, phx_group *group, bool agrees, const char *name, int64_t timeout_ms,
                  phx_group **out, Derive derive_group) {
  return with_live_handle(operation, group, [&](Group &parent) -> phx_status {
    int64_t timeout = 0;
    phx_status status = parent.resolve_timeout(operation, timeout_ms, &timeout);
    if (status == PHX_OK && out == nullptr) status = fail(PHX_ERR_INVALID, operation, "out is NULL");
    if (status == PHX_OK && name != nullptr) status = check_name(operation, name);
    if (status != PHX_OK) return agrees ? parent.refuse_agreement() : parent.refuse_exchange();
    std::shared_ptr<Group> derived;
    PHX_TRY(derive_group(parent, name != nullptr ? name : parent.name(), timeout, &derived));
    *out = derived ? new phx_group{{1}, std::move(derived)} : nullptr;
    return PHX_OK;
  });
}

// The values by which a group chooses its algorithms are the same on all its ranks.
template <class Values, class Get>
phx_status get_tuning(const char *operation, phx_group *group, Values *out, const Get &get) {
  return with_handle(operation, group, [&](Group &g) { return copy_out(get(g), out, operation); });
}

// Calls agree(group, values, resolved timeout in ms).
template <class Values, class Agree>
phx_status set_tuning(const char *operation, phx_group *group, const Values *values, int64_t timeout_ms,
                      const Agree &agree) {
  return with_handle(operation, group, [&](Group &g) -> phx_status {
    Values copy{};
    phx_status status =
        values == nullptr ? fail(PHX_ERR_INVALID, operation, "tuning is NULL") : read_in(values, &copy, operation);
    if (status == PHX_OK && copy.flags != 0) status = fail(PHX_ERR_INVALID, operation, "flags must be 0");
    int64_t timeout = 0;
    if (status == PHX_OK) status = g.resolve_timeout(operation, timeout_ms, &timeout);
    return status == PHX_OK ? agree(g, copy, timeout) : g.refuse_exchange();
  });
}

}  // namespace

extern "C" {

phx_status phx_group_create(phx_world *world, const char *name, const int32_t *ranks, int32_t count, int64_t timeout_ms,
                            phx_group **out) {
  return phx_group_create_with_options(world, name, ranks, count, nullptr, timeout_ms, out);
}

phx_status phx_group_create_with_options(phx_world *world, const char *name, const int32_t *ranks, int32_t count,
                                         const phx_group_options *options, int64_t timeout_ms, phx_group **out) {
  return with_live_handle("group_create", world, [&](const World &w, const char *operation) -> phx_status {
    int self = -1;
    PHX_TRY(check_name(operation, name));
    PHX_TRY(check_size(operation, name, count));
    PHX_TRY(check_ranks(operation, w, name, ranks, count, &self));
    GroupParams params;
    params.name = name;
    params.ranks.assign(ranks, ranks + count);
    params.group_rank = self;
    params.of_world = true;
    params.store = store_ref(w.store());
    // Groups of the same name with other ranks, such as the rows of a mesh, may be created at the same time.
    const uint64_t members = hash_bytes(ranks, count * sizeof *ranks);
    params.name_key = w.job() + "/group/" + name + "/" + std::to_string(members);
    const phx_status status = read_options(operation, options, &params);
    return make(world, operation, std::move(params), status, timeout_ms, out);
  });
}

phx_status phx_group_attach(phx_world *world, const char *name, int32_t group_rank, int32_t group_size,
                            phx_store *store, int64_t timeout_ms, phx_group **out) {
  return phx_group_attach_with_options(world, name, group_rank, group_size, store, nullptr, timeout_ms, out);
}

phx_status phx_group_attach_with_options(phx_world *world, const char *name, int32_t group_rank, int32_t group_size,
                                         phx_store *store, const phx_group_options *options, int64_t timeout_ms,
                                         phx_group **out) {
  return with_live_handle("group_attach", world, [&](const World &w, const char *operation) -> phx_status {
    PHX_TRY(check_name(operation, name));
    PHX_TRY(check_size(operation, name, group_size));
    phx_status status = PHX_OK;
    if (group_rank < 0 || group_rank >= group_size)
      status = fail_text(PHX_ERR_INVALID, operation,
                         "%s '%s': group_rank is %d, which is not in the group of %d ranks; give 0 to the size minus 1",
                         operation, name, group_rank, group_size);
    if (store == nullptr && group_size > 1)
      return fail_text(
          PHX_ERR_INVALID, operation,
          "%s '%s': store is NULL, but a group of %d ranks needs a store through which they find each other", operation,
          name, group_size);
    GroupParams params;
    params.name = name;
    for (int32_t i = 0; i < group_size; ++i) params.ranks.push_back(i);
    params.group_rank = group_rank;
    params.store = store_ref(store);
    params.name_key = w.job() + "/attach/" + name;
    if (status == PHX_OK) status = read_options(operation, options, &params);
    return make(world, operation, std::move(params), status, timeout_ms, out);
  });
}

phx_status phx_group_split(phx_group *group, int32_t color, int32_t key, const char *name, int64_t timeout_ms,
                           phx_group **out) {
  return derive("group_split", group, false, name, timeout_ms, out,
                [&](Group &parent, const std::string &new_name, int64_t timeout, std::shared_ptr<Group> *derived) {
                  return parent.split(color, key, new_name, timeout, derived);
                });
}

phx_status phx_group_shrink(phx_group *group, const char *name, int64_t timeout_ms, phx_group **out) {
  return derive("group_shrink", group, true, name, timeout_ms, out, std::mem_fn(&Group::shrink));
}

phx_status phx_group_agree(phx_group *group, uint64_t *bits, uint8_t *alive, int64_t timeout_ms) {
  return with_live_handle("group_agree", group, [&](Group &g, const char *operation) -> phx_status {
    int64_t timeout = 0;
    phx_status status = g.resolve_timeout(operation, timeout_ms, &timeout);
    if (status == PHX_OK && bits == nullptr) status = fail(PHX_ERR_INVALID, operation, "inout_bits is NULL");
    return status == PHX_OK ? g.agree(bits, alive, timeout) : g.refuse_agreement();
  });
}

phx_status phx_group_get_info(phx_group *group, phx_group_info *out) {
  return with_handle("group_get_info", group, [&](Group &g, const char *operation) {
    phx_group_info info = PHX_GROUP_INFO_INIT;
    info.group_rank = g.group_rank();
    info.group_size = g.size();
    info.state = g.failed() ? PHX_GROUP_FAILED : PHX_GROUP_ACTIVE;
    info.id = g.id();
    info.sequence = collectives_of(g).engine(0).sequence();
    info.name = g.name().c_str();
    info.ranks = g.ranks().data();
    info.channels = g.channels();
    info.hosts = static_cast<uint32_t>(g.hosts().count());
    info.reduction_order = g.reduction_order();
    return copy_out(info, out, operation);
  });
}

phx_status phx_group_get_stats(phx_group *group, phx_group_stats *out) {
  return with_handle("group_get_stats", group, [&](Group &g, const char *operation) {
    phx_group_stats stats = PHX_GROUP_STATS_INIT;
    stats.eager_bytes = g.eager_bytes();
    for (uint32_t i = 0; i < g.channels(); ++i) stats.zero_copies += collectives_of(g).engine(i).zero_copies();
    return copy_out(stats, out, operation);
  });
}

int32_t phx_group_rank(const phx_group *group) {
  return check_handle("group_rank", group) == PHX_OK ? group->ptr->group_rank() : -1;
}

int32_t phx_group_size(const phx_group *group) {
  return check_handle("group_size", group) == PHX_OK ? group->ptr->size() : -1;
}

phx_status phx_group_revoke(phx_group *group, const char *reason) {
  return with_handle("group_revoke", group, [&](Group &g) { g.revoke("group_revoke", reason); });
}

phx_status phx_group_get_error(phx_group *group, phx_error_info *out) {
  return with_handle("group_get_error", group, [&](Group &g, const char *operation) -> phx_status {
    gpu_of(g).note_launches();
    if (!g.failed())
      return fail(PHX_ERR_NOT_FOUND, operation, "group '%s' has not failed, so there is no error to return",
                  g.name().c_str());
    ErrorInfo cause = g.cause();
    if (cause.rank < 0) cause.rank = g.self_rank();  // a death, which any rank may report as its own error
    return copy_error_out(cause, out, operation);
  });
}

phx_status phx_group_refuse(phx_group *group, uint32_t channel, const char *why) {
  return with_live_handle("group_refuse", group, [&](Group &g, const char *operation) -> phx_status {
    if (channel >= g.channels())
      return fail(PHX_ERR_INVALID, operation,
                  "channel is %u, but group '%s' has %u channels, numbered from 0; use one of them, or raise "
                  "phx_world_params.channels",
                  channel, g.name().c_str(), g.channels());
    const KeptError kept;
    fail_text(PHX_ERR_INVALID, operation, "%s", why != nullptr ? why : "no reason given");
    collectives_of(g).refuse(channel);
    return PHX_OK;
  });
}

phx_status phx_group_set_timeout(phx_group *group, int64_t timeout_ms) {
  return with_handle("group_set_timeout", group, [&](Group &g, const char *operation) {
    const phx_status status = check_default_timeout(operation, timeout_ms);
    if (status == PHX_OK) g.set_timeout_ms(timeout_ms);
    return status;
  });
}

phx_status phx_group_get_tuning(phx_group *group, phx_tuning *out) {
  return get_tuning("group_get_tuning", group, out, std::mem_fn(&Group::tuning));
}

phx_status phx_group_set_tuning(phx_group *group, const phx_tuning *tuning, int64_t timeout_ms) {
  return set_tuning("group_set_tuning", group, tuning, timeout_ms, std::mem_fn(&Group::agree_tuning));
}

phx_status phx_group_save_tuning(phx_group *group, const char *path) {  // NULL: to tuning_path()
  return with_handle("group_save_tuning", group,
                     [&](Group &g) { return save_tuning(path != nullptr ? path : "", g.size(), g.tuning()); });
}

const char *phx_tuning_host(void) { return tuning_host().c_str(); }

phx_status phx_group_get_gpu_tuning(phx_group *group, phx_gpu_tuning *out) {
  return get_tuning("group_get_gpu_tuning", group, out, [](Group &g) { return gpu_of(g).tuning(); });
}

phx_status phx_group_set_gpu_tuning(phx_group *group, const phx_gpu_tuning *tuning, int64_t timeout_ms) {
  return set_tuning(
      "group_set_gpu_tuning", group, tuning, timeout_ms,
      [](Group &g, const GpuTuning &wish, int64_t timeout) { return gpu_of(g).agree_tuning(wish, timeout); });
}

phx_status phx_group_save_gpu_tuning(phx_group *group, const char *path) {
  return with_handle("group_save_gpu_tuning", group, [&](Group &g, const char *operation) {
    return gpu_of(g).save_tuning(operation, path != nullptr ? path : "");
  });
}

phx_group *phx_group_retain(phx_group *group) {
  if (group != nullptr) group->references.fetch_add(1, std::memory_order_relaxed);
  return group;
}

void phx_group_release(phx_group *group) {
  if (group == nullptr || is_inherited(group)) return;
  if (group->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete group;
}
}
