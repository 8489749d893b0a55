// Implements phx_world_*.
#include <atomic>

#include "api/entry.h"
#include "base/environment.h"
#include "gpu/memory.h"
#include "kernels/kernels.h"
#include "net/ucx.h"

using namespace phx;

namespace {

// Logs what is wrong with the environment variables of this process: once, and when a log callback is set.
void warn_about_environment() {
  static std::atomic<bool> warned{false};
  if (!logs(PHX_LOG_WARNING) || warned.exchange(true)) return;
  for (const std::string &problem : {kernels::isa_problem(), tuning_problem(), dump_problem(), wait_warning_problem()})
    if (!problem.empty()) PHX_LOG(PHX_LOG_WARNING, "%s", problem.c_str());
  const std::string unknown = unknown_variables();
  if (!unknown.empty())
    PHX_LOG(PHX_LOG_WARNING,
            "environment variables that Phalanx does not know, and ignores: %s. docs/reference/environment lists all.",
            unknown.c_str());
}

}  // namespace

extern "C" {

phx_status phx_world_create(const phx_world_params *params, phx_world **out) {
  return guarded("world_create", [&](const char *operation) -> phx_status {
    if (params == nullptr || out == nullptr) return fail(PHX_ERR_INVALID, operation, "params or out is NULL");
    phx_world_params p = PHX_WORLD_PARAMS_INIT;
    PHX_TRY(read_in(params, &p, operation));
    if (p.size < 1 || p.size > kMaxRanks)
      return fail(PHX_ERR_INVALID, operation, "size is %d; it must be 1 to %d", p.size, kMaxRanks);
    if (p.rank < 0 || p.rank >= p.size)
      return fail(PHX_ERR_INVALID, operation, "rank is %d, which is not in a world of size %d; give 0 to size - 1",
                  p.rank, p.size);
    if (p.store == nullptr && p.size > 1)
      return fail(PHX_ERR_INVALID, operation,
                  "store is NULL, but a world of %d ranks needs a store through which they find each other", p.size);
    PHX_TRY(check_default_timeout(operation, p.timeout_ms));
    if (p.staging_bytes > (uint64_t{1} << 30) || (p.staging_bytes != 0 && p.staging_bytes < 256))
      return fail(PHX_ERR_INVALID, operation, "staging_bytes is %llu; it must be 256 to 2^30, or 0",
                  static_cast<unsigned long long>(p.staging_bytes));
    if (p.signal_channels > 65536)
      return fail(PHX_ERR_INVALID, operation, "signal_channels is %u; at most 65536 are allowed", p.signal_channels);
    if (p.channels > kMaxChannels)
      return fail(PHX_ERR_INVALID, operation, "channels is %u; at most %u are allowed", p.channels, kMaxChannels);
    if (p.recorder_entries > kMaxRecorderEntries)
      return fail(PHX_ERR_INVALID, operation, "recorder_entries is %u; at most %u are allowed", p.recorder_entries,
                  kMaxRecorderEntries);
    if ((p.flags & ~uint32_t{PHX_WORLD_PROGRESS}) != 0)
      return fail(PHX_ERR_INVALID, operation, "flags is %#x; it must be 0 or PHX_WORLD_PROGRESS", p.flags);
    warn_about_environment();
    std::shared_ptr<World> world;
    PHX_TRY(World::create(p, &world));
    world->carrier().make_on_demand(&ucx_carrier);
    world->allocators().make_on_demand(PHX_DEVICE_CUDA, "cuda", &cuda::make_allocator);
    *out = new phx_world{std::move(world)};
    return PHX_OK;
  });
}

phx_status phx_world_dump(phx_world *world, char *json, size_t capacity, size_t *size) {
  return with_live_handle("world_dump", world, [&](World &w, const char *operation) -> phx_status {
    if (size == nullptr || (json == nullptr && capacity != 0))
      return fail(PHX_ERR_INVALID, operation, "size or json is NULL");
    const std::string text = dump_world(w);
    *size = text.size();
    if (capacity != 0) copy_text(json, capacity, text.c_str());
    return PHX_OK;
  });
}

phx_status phx_world_finalize(phx_world *world) {
  if (is_inherited(world)) return PHX_OK;
  return with_handle("world_finalize", world, [](World &w) { w.finalize(); });
}

phx_status phx_world_abort(phx_world *world, const char *reason) {
  return with_live_handle("world_abort", world, [&](World &w) {
    for (const auto &group : groups_of(w)) group->revoke("world_abort", reason);
  });
}

void phx_world_release(phx_world *world) {
  if (world == nullptr || is_inherited(world)) return;
  (void)guarded("world_release", [&] {
    world->ptr->finalize();
    delete world;
  });
}

phx_status phx_world_check(phx_world *world) {
  return with_live_handle("world_check", world, [](World &w) -> phx_status {
    for (const auto &group : groups_of(w))
      if (group->failed()) return set_last_error(group->cause());
    return PHX_OK;
  });
}

phx_status phx_world_check_peer(phx_world *world, int32_t rank) {
  return with_live_handle("world_check_peer", world, [&](World &w, const char *operation) -> phx_status {
    PHX_TRY(w.look_at_rank(rank));
    for (const auto &group : groups_of(w)) {  // another rank may have seen it first, and told
      if (!group->failed()) continue;
      const ErrorInfo &cause = group->cause();
      if (cause.status == PHX_ERR_PEER_DEAD && cause.peer == rank)
        return fail_text(PHX_ERR_PEER_DEAD, operation, "%s", cause.text).rank(w.rank()).peer(rank);
    }
    return PHX_OK;
  });
}

int32_t phx_world_rank(const phx_world *world) {
  return check_handle("world_rank", world) == PHX_OK ? world->ptr->rank() : -1;
}

int32_t phx_world_size(const phx_world *world) {
  return check_handle("world_size", world) == PHX_OK ? world->ptr->size() : -1;
}

uint64_t phx_world_host_id(const phx_world *world) {
  return check_handle("world_host_id", world) == PHX_OK ? world->ptr->record().host_id : 0;
}

phx_status phx_world_set_carrier(phx_world *world, const phx_carrier_ops *ops, void *self) {
  return with_live_handle("world_set_carrier", world, [&](World &w, const char *operation) -> phx_status {
    phx_carrier_ops read{};
    read.struct_size = sizeof read;
    PHX_TRY(ops == nullptr ? fail(PHX_ERR_INVALID, operation, "ops is NULL") : read_in(ops, &read, operation));
    const bool whole = read.name != nullptr && read.open != nullptr && read.address != nullptr &&
                       read.connect != nullptr && read.send != nullptr && read.recv != nullptr &&
                       read.test != nullptr && read.cancel != nullptr && read.progress != nullptr &&
                       read.disconnect != nullptr && read.close != nullptr;
    if (!whole || read.flags != 0)
      return fail(PHX_ERR_INVALID, operation,
                  "name or a function of phx_carrier_ops is NULL, or flags is not 0; give all functions, and flags 0");
    if (!w.carrier().set(std::make_shared<Carrier>(read, self)))
      return fail(PHX_ERR_UNSUPPORTED, operation,
                  "a group of this world spans hosts already; set the carrier before the first such group");
    return PHX_OK;
  });
}

phx_status phx_world_set_timeout(phx_world *world, int64_t timeout_ms) {
  return with_live_handle("world_set_timeout", world, [&](World &w, const char *operation) {
    const phx_status status = check_default_timeout(operation, timeout_ms);
    if (status == PHX_OK) w.set_default_timeout_ms(timeout_ms == 0 ? kDefaultTimeoutMs : timeout_ms);
    return status;
  });
}
}
