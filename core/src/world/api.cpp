// phx_world_*, phx_allocator_* and phx_mem_*.
#include "base/error.h"
#include "base/guard.h"
#include "base/read_in.h"
#include "group/group.h"
#include "memory/allocator.h"
#include "world/world.h"

using phx::fail;
using phx::guarded;
using phx::read_in;

namespace {

constexpr phx_device kCpu{PHX_DEV_CPU, 0};

phx_status check_world(const phx_world *world, const char *operation) {
  if (world == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: world is NULL", operation);
  if (world->ptr->finalized()) return fail(PHX_ERR_INVALID, operation, "%s: this world was finalized", operation);
  return PHX_OK;
}

}  // namespace

extern "C" {

phx_status phx_world_create(const phx_world_params *params, phx_world **out) {
  const char *operation = "world_create";
  return guarded(operation, [&]() -> phx_status {
    if (params == nullptr || out == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: params or out is NULL", operation);
    phx_world_params p;
    phx_status status = read_in(params, &p, operation);
    if (status != PHX_OK) return status;
    if (p.size < 1 || p.size > phx::kMaxRanks)
      return fail(PHX_ERR_INVALID, operation, "%s: size is %d; it must be 1 to %d", operation, p.size, phx::kMaxRanks);
    if (p.rank < 0 || p.rank >= p.size)
      return fail(PHX_ERR_INVALID, operation, "%s: rank is %d in a world of %d", operation, p.rank, p.size);
    if (p.store == nullptr && p.size > 1)
      return fail(PHX_ERR_INVALID, operation, "%s: a world of %d ranks needs a store through which they meet", operation, p.size);
    if (p.timeout_ms < 0)
      return fail(PHX_ERR_INVALID, operation, "%s: timeout_ms is %lld; it must be positive, or 0 for the default", operation,
                  static_cast<long long>(p.timeout_ms));
    if (p.staging_bytes > (uint64_t{1} << 30) || (p.staging_bytes != 0 && p.staging_bytes < 256))
      return fail(PHX_ERR_INVALID, operation, "%s: staging_bytes is %llu; it must be 256 to 2^30, or 0", operation,
                  static_cast<unsigned long long>(p.staging_bytes));
    if (p.signal_channels > 65536)
      return fail(PHX_ERR_INVALID, operation, "%s: signal_channels is %u; at most 65536", operation, p.signal_channels);
    if (p.flags != 0 || p.reserved != 0) return fail(PHX_ERR_INVALID, operation, "%s: flags and reserved must be 0", operation);
    std::shared_ptr<phx::World> world;
    status = phx::World::create(p, &world);
    if (status != PHX_OK) return status;
    *out = new phx_world{std::move(world)};
    return PHX_OK;
  });
}

phx_status phx_world_finalize(phx_world *world) {
  const char *operation = "world_finalize";
  return guarded(operation, [&]() -> phx_status {
    if (world == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: world is NULL", operation);
    world->ptr->finalize();
    return PHX_OK;
  });
}

void phx_world_release(phx_world *world) {
  if (world == nullptr) return;
  (void)guarded("world_release", [&]() -> phx_status {
    world->ptr->finalize();
    delete world;
    return PHX_OK;
  });
}

phx_status phx_world_check(phx_world *world) {
  const char *operation = "world_check";
  return guarded(operation, [&]() -> phx_status {
    const phx_status status = check_world(world, operation);
    if (status != PHX_OK) return status;
    for (const auto &group : world->ptr->groups())
      if (group->failed()) return phx::set_last_error(group->cause());
    return PHX_OK;
  });
}

int32_t phx_world_rank(const phx_world *world) { return world == nullptr ? -1 : world->ptr->rank(); }

int32_t phx_world_size(const phx_world *world) { return world == nullptr ? -1 : world->ptr->size(); }

uint64_t phx_world_host_id(const phx_world *world) { return world == nullptr ? 0 : world->ptr->record().host_id; }

phx_status phx_world_set_timeout(phx_world *world, int64_t timeout_ms) {
  const char *operation = "world_set_timeout";
  const phx_status status = check_world(world, operation);
  if (status != PHX_OK) return status;
  if (timeout_ms <= 0)
    return fail(PHX_ERR_INVALID, operation, "%s: timeout_ms is %lld; it must be positive", operation, static_cast<long long>(timeout_ms));
  world->ptr->set_default_timeout_ms(timeout_ms);
  return PHX_OK;
}

phx_status phx_allocator_register(phx_world *world, int32_t device_type, const phx_allocator_ops *ops, void *self) {
  const char *operation = "allocator_register";
  return guarded(operation, [&]() -> phx_status {
    phx_status status = check_world(world, operation);
    if (status != PHX_OK) return status;
    if (ops == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: ops is NULL", operation);
    phx_allocator_ops copy;
    status = read_in(ops, &copy, operation);
    if (status != PHX_OK) return status;
    if (copy.name == nullptr || copy.alloc == nullptr || copy.free == nullptr || copy.export_handle == nullptr ||
        copy.import_handle == nullptr || copy.unmap == nullptr)
      return fail(PHX_ERR_INVALID, operation, "%s: name and every function but destroy must be given", operation);
    world->ptr->allocators().put(device_type, std::make_shared<phx::Allocator>(copy, self));
    return PHX_OK;
  });
}

phx_status phx_allocator_unregister(phx_world *world, int32_t device_type) {
  const char *operation = "allocator_unregister";
  return guarded(operation, [&]() -> phx_status {
    const phx_status status = check_world(world, operation);
    if (status != PHX_OK) return status;
    if (!world->ptr->allocators().remove(device_type))
      return fail(PHX_ERR_NOT_FOUND, operation, "%s: no allocator is registered for device type %d", operation, device_type);
    return PHX_OK;
  });
}

phx_status phx_allocator_name(phx_world *world, int32_t device_type, const char **out) {
  const char *operation = "allocator_name";
  return guarded(operation, [&]() -> phx_status {
    const phx_status status = check_world(world, operation);
    if (status != PHX_OK) return status;
    if (out == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: out is NULL", operation);
    const phx::AllocatorRef allocator = world->ptr->allocators().get(device_type, operation);
    if (!allocator) return PHX_ERR_UNSUPPORTED;
    *out = allocator->ops().name;
    return PHX_OK;
  });
}

phx_status phx_mem_alloc(phx_world *world, const phx_device *device, size_t size, void **out) {
  const char *operation = "mem_alloc";
  return guarded(operation, [&]() -> phx_status {
    const phx_status status = check_world(world, operation);
    if (status != PHX_OK) return status;
    if (out == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: out is NULL", operation);
    const phx_device where = device != nullptr ? *device : kCpu;
    phx::AllocatorRef allocator = world->ptr->allocators().get(where.type, operation);
    if (!allocator) return PHX_ERR_UNSUPPORTED;
    return world->ptr->blocks().alloc(std::move(allocator), where, size, out);
  });
}

phx_status phx_mem_alloc_persistent(phx_world *world, const phx_device *device, size_t size, const char *scope, uint64_t alloc_id,
                                    void **out) {
  const char *operation = "mem_alloc_persistent";
  return guarded(operation, [&]() -> phx_status {
    const phx_status status = check_world(world, operation);
    if (status != PHX_OK) return status;
    if (out == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: out is NULL", operation);
    const phx_device where = device != nullptr ? *device : kCpu;
    phx::AllocatorRef allocator = world->ptr->allocators().get(where.type, operation);
    if (!allocator) return PHX_ERR_UNSUPPORTED;
    return world->ptr->blocks().alloc_persistent(std::move(allocator), where, size, scope != nullptr ? scope : "", alloc_id, out);
  });
}

// Memory outlives finalize, so that tensors may die late: the four below accept a finalized world.

phx_status phx_mem_retain(phx_world *world, void *pointer) {
  return guarded("mem_retain", [&]() -> phx_status {
    if (world == nullptr) return fail(PHX_ERR_INVALID, "mem_retain", "mem_retain: world is NULL");
    return world->ptr->blocks().retain(pointer);
  });
}

phx_status phx_mem_free(phx_world *world, void *pointer) {
  return guarded("mem_free", [&]() -> phx_status {
    if (world == nullptr) return fail(PHX_ERR_INVALID, "mem_free", "mem_free: world is NULL");
    phx::BlockRef gone;
    const phx_status status = world->ptr->blocks().free(pointer, &gone);
    if (gone) world->ptr->forget_block(gone);
    return status;
  });
}

phx_status phx_mem_drop(phx_world *world, const phx_device *device, const char *scope, uint64_t alloc_id) {
  return guarded("mem_drop", [&]() -> phx_status {
    if (world == nullptr) return fail(PHX_ERR_INVALID, "mem_drop", "mem_drop: world is NULL");
    phx::BlockRef gone;
    const phx_status status =
        world->ptr->blocks().drop(device != nullptr ? *device : kCpu, scope != nullptr ? scope : "", alloc_id, &gone);
    if (gone) world->ptr->forget_block(gone);
    return status;
  });
}

phx_status phx_mem_find(phx_world *world, const void *pointer, phx_mem_info *out) {
  return guarded("mem_find", [&]() -> phx_status {
    if (world == nullptr) return fail(PHX_ERR_INVALID, "mem_find", "mem_find: world is NULL");
    return world->ptr->blocks().info(pointer, out);
  });
}

phx_status phx_mem_count(phx_world *world, size_t *blocks, size_t *bytes) {
  return guarded("mem_count", [&]() -> phx_status {
    if (world == nullptr || blocks == nullptr || bytes == nullptr)
      return fail(PHX_ERR_INVALID, "mem_count", "mem_count: an argument is NULL");
    world->ptr->blocks().count(blocks, bytes);
    return PHX_OK;
  });
}
}
