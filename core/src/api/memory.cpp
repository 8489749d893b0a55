// phx_allocator_* and phx_mem_*.
#include "base/error.h"
#include "base/guard.h"
#include "base/read_in.h"
#include "world/allocator.h"
#include "world/world.h"

using phx::check_world;
using phx::fail;
using phx::guarded;
using phx::read_in;

namespace {

constexpr phx_device kCpu{PHX_DEVICE_CPU, 0};

}  // namespace

extern "C" {

phx_status phx_allocator_register(phx_world *world, int32_t device_type, const phx_allocator_ops *ops, void *self) {
  const char *operation = "allocator_register";
  return guarded(operation, [&]() -> phx_status {
    phx_status status = check_world(operation, world);
    if (status != PHX_OK) return status;
    if (ops == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: ops is NULL", operation);
    phx_allocator_ops copy = PHX_ALLOCATOR_OPS_INIT;
    status = read_in(ops, &copy, operation);
    if (status != PHX_OK) return status;
    if (copy.name == nullptr || copy.alloc == nullptr || copy.free == nullptr || copy.export_handle == nullptr ||
        copy.import_handle == nullptr || copy.unmap == nullptr)
      return fail(PHX_ERR_INVALID, operation, "%s: name and every function but destroy must be given", operation);
    if ((copy.flags & ~uint32_t{PHX_ALLOCATOR_DEVICE_MEMORY}) != 0)
      return fail(PHX_ERR_INVALID, operation, "%s: flags may only have PHX_ALLOCATOR_DEVICE_MEMORY", operation);
    world->ptr->allocators().put(device_type, std::make_shared<phx::Allocator>(copy, self));
    return PHX_OK;
  });
}

phx_status phx_allocator_unregister(phx_world *world, int32_t device_type) {
  const char *operation = "allocator_unregister";
  return guarded(operation, [&]() -> phx_status {
    const phx_status status = check_world(operation, world);
    if (status != PHX_OK) return status;
    if (!world->ptr->allocators().remove(device_type))
      return fail(PHX_ERR_NOT_FOUND, operation, "%s: no allocator is registered for device type %d", operation,
                  device_type);
    return PHX_OK;
  });
}

phx_status phx_mem_alloc(phx_world *world, const phx_device *device, size_t size, void **out) {
  const char *operation = "mem_alloc";
  return guarded(operation, [&]() -> phx_status {
    const phx_status status = check_world(operation, world);
    if (status != PHX_OK) return status;
    if (out == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: out is NULL", operation);
    const phx_device where = device != nullptr ? *device : kCpu;
    phx::AllocatorRef allocator = world->ptr->allocators().get(where.type, operation);
    if (!allocator) return PHX_ERR_UNSUPPORTED;
    return world->ptr->blocks().alloc(std::move(allocator), where, size, out);
  });
}

phx_status phx_mem_alloc_persistent(phx_world *world, const phx_device *device, size_t size, const char *scope,
                                    uint64_t alloc_id, void **out) {
  const char *operation = "mem_alloc_persistent";
  return guarded(operation, [&]() -> phx_status {
    const phx_status status = check_world(operation, world);
    if (status != PHX_OK) return status;
    if (out == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: out is NULL", operation);
    const phx_device where = device != nullptr ? *device : kCpu;
    phx::AllocatorRef allocator = world->ptr->allocators().get(where.type, operation);
    if (!allocator) return PHX_ERR_UNSUPPORTED;
    return world->ptr->blocks().alloc_persistent(std::move(allocator), where, size, scope != nullptr ? scope : "",
                                                 alloc_id, out);
  });
}

// Memory outlives finalize, so that tensors may die late: the four below accept a finalized world.

phx_status phx_mem_retain(phx_world *world, void *pointer) {
  return guarded("mem_retain", world, [&]() -> phx_status {
    if (world == nullptr) return fail(PHX_ERR_INVALID, "mem_retain", "mem_retain: world is NULL");
    return world->ptr->blocks().retain(pointer);
  });
}

phx_status phx_mem_free(phx_world *world, void *pointer) {
  return guarded("mem_free", world, [&]() -> phx_status {
    if (world == nullptr) return fail(PHX_ERR_INVALID, "mem_free", "mem_free: world is NULL");
    phx::BlockRef gone;
    const phx_status status = world->ptr->blocks().free(pointer, &gone);
    if (gone) world->ptr->forget_block(gone);
    return status;
  });
}

phx_status phx_mem_drop(phx_world *world, const phx_device *device, const char *scope, uint64_t alloc_id) {
  return guarded("mem_drop", world, [&]() -> phx_status {
    if (world == nullptr) return fail(PHX_ERR_INVALID, "mem_drop", "mem_drop: world is NULL");
    phx::BlockRef gone;
    const phx_status status =
        world->ptr->blocks().drop(device != nullptr ? *device : kCpu, scope != nullptr ? scope : "", alloc_id, &gone);
    if (gone) world->ptr->forget_block(gone);
    return status;
  });
}

phx_status phx_mem_find(phx_world *world, const void *pointer, phx_mem_info *out) {
  return guarded("mem_find", world, [&]() -> phx_status {
    if (world == nullptr) return fail(PHX_ERR_INVALID, "mem_find", "mem_find: world is NULL");
    return world->ptr->blocks().info(pointer, out);
  });
}

phx_status phx_mem_count(phx_world *world, size_t *blocks, size_t *bytes) {
  return guarded("mem_count", world, [&]() -> phx_status {
    if (world == nullptr || blocks == nullptr || bytes == nullptr)
      return fail(PHX_ERR_INVALID, "mem_count", "mem_count: an argument is NULL");
    world->ptr->blocks().count(blocks, bytes);
    return PHX_OK;
  });
}
}
