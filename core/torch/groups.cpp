// The registry of groups. Lookups share a lock and take a reference, so a group may be removed while another thread is
// in a call on it. Never destroyed: a kernel may run while the process exits.
#include "groups.h"

#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "arenas.h"
#include "base/fork.h"
#include "errors.h"
#include "gpu.h"
#include "pending.h"
#include "phalanx/tuning.h"
#include "phalanx_torch.h"

namespace phxt {
namespace {

// A process has a handful of groups, so a scan of short names beats a hash of a pair.
struct Registered {
  uint64_t context;
  GroupRef group;
  uint32_t made_in = phx::process_generation();
};
struct Registry {
  phx::AcrossForks<std::shared_mutex> mutex;
  std::vector<Registered> groups;

  std::vector<Registered>::iterator find(uint64_t context, std::string_view name) {
    auto found = groups.begin();
    while (found != groups.end() && !(found->context == context && found->group->name == name)) ++found;
    return found;
  }
};
Registry &registry() {
  static Registry *const made = new Registry;
  return *made;
}

thread_local uint64_t thread_context = 0;

std::string describe(uint64_t context, const char *name) {
  return "group '" + std::string(name) + "' of " +
         (context == PHXT_EVERY_CONTEXT ? "every context" : "context " + std::to_string(context));
}

}  // namespace

uint64_t current_context() { return thread_context; }

GroupRef find_group(uint64_t context, std::string_view name) {
  Registry &all = registry();
  const std::shared_lock lock(all.mutex);
  const auto found = all.find(context, name);
  return found == all.groups.end() ? nullptr : found->group;
}

GroupRef find_group(std::string_view name) {
  GroupRef found = find_group(current_context(), name);
  return found ? found : find_group(PHXT_EVERY_CONTEXT, name);
}

}  // namespace phxt

using namespace phxt;

extern "C" {

void phxt_set_context(uint64_t context) { thread_context = context; }
uint64_t phxt_context(void) { return thread_context; }

phx_status phxt_group_add(uint64_t context, const char *name, phx_group *group) {
  if (name == nullptr || group == nullptr)
    return set_error(PHX_ERR_INVALID, "phxt_group_add: name and group must not be NULL");
  phx_group_stats stats = PHX_GROUP_STATS_INIT;
  const phx_status status = phx_group_get_stats(group, &stats);
  if (status != PHX_OK) return set_error(status, phx_last_error());
  auto added = std::make_shared<Group>();
  added->handle = phx_group_retain(group);
  added->name = name;
  added->rank = phx_group_rank(group);
  added->size = phx_group_size(group);
  added->eager_bytes = stats.eager_bytes;
  Registry &all = registry();
  const std::unique_lock lock(all.mutex);
  const auto found = all.find(context, name);
  if (found == all.groups.end()) {
    all.groups.push_back({context, std::move(added)});
    return PHX_OK;
  }
  if (found->made_in == phx::process_generation())
    return set_error(PHX_ERR_EXISTS, describe(context, name) + " is already registered: phxt_group_remove it first");
  *found = {context, std::move(added)};  // a forked child has no use for its parent's group of that name
  return PHX_OK;
}

phx_status phxt_group_remove(uint64_t context, const char *name) {
  if (name == nullptr) return set_error(PHX_ERR_INVALID, "phxt_group_remove: name must not be NULL");
  GroupRef removed;  // released after the lock: that may unmap memory
  {
    Registry &all = registry();
    const std::unique_lock lock(all.mutex);
    const auto found = all.find(context, name);
    if (found == all.groups.end()) return set_error(PHX_ERR_NOT_FOUND, describe(context, name) + " is not registered");
    removed = std::move(found->group);
    all.groups.erase(found);
  }
  pending_leave(removed.get());
  arenas_leave(removed.get());
  return PHX_OK;
}

phx_status phxt_group_serve(uint64_t context, const char *name, int32_t device_type, int32_t serves) {
  const GroupRef group = name ? find_group(context, name) : nullptr;
  if (!group)
    return set_error(PHX_ERR_NOT_FOUND, describe(context, name ? name : "") + " is not registered: phxt_group_add it");
  if (device_type != PHX_DEVICE_CPU && device_type != PHX_DEVICE_CUDA)
    return set_error(PHX_ERR_INVALID, "phxt_group_serve: device_type is " + std::to_string(device_type) +
                                          ", but must be PHX_DEVICE_CPU or PHX_DEVICE_CUDA");
  if (device_type == PHX_DEVICE_CUDA && serves != 0 && !gpu::knows_streams())
    return set_error(PHX_ERR_UNSUPPORTED,
                     "phxt_group_serve: this torch does not tell its current stream; install one that was built for "
                     "CUDA");
  (device_type == PHX_DEVICE_CPU ? group->serves_cpu : group->serves_cuda)
      .store(serves != 0, std::memory_order_relaxed);
  return PHX_OK;
}

phx_group *phxt_group_find(const char *name) {
  const GroupRef group = name ? find_group(name) : nullptr;
  return group ? phx_group_retain(group->handle) : nullptr;
}

int32_t phxt_group_has(uint64_t context, const char *name) {
  return name != nullptr && find_group(context, name) ? 1 : 0;
}

}  // extern "C"
