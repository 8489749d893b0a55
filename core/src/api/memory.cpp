// Implements phx_allocator_* and phx_mem_*.
#include "api/entry.h"
#include "symm/table.h"
#include "world/allocator.h"

using phx::fail;
using phx::with_handle;
using phx::with_live_handle;

namespace {

constexpr phx_device kCpu{PHX_DEVICE_CPU, 0};

// Drops the symmetric allocations with a block that was freed.
void forget(const phx::World &world, const phx::Block &block) {
  for (const auto &group : phx::groups_of(world)) phx::symms_of(*group).forget(block.serial);
}

// Finds the allocator of `device` (NULL: the CPU), with which `take` gets a block from the table of the world.
template <class Take>
phx_status alloc(const char *operation, phx_world *world, const phx_device *device, void **out, const Take &take) {
  return with_live_handle(operation, world, [&](phx::World &w) -> phx_status {
    if (out == nullptr) return fail(PHX_ERR_INVALID, operation, "out is NULL");
    const phx_device where = device != nullptr ? *device : kCpu;
    const phx::AllocatorRef allocator = w.allocators().get(where.type, operation);
    return allocator ? take(w.blocks(), allocator, where) : PHX_ERR_UNSUPPORTED;
  });
}

}  // namespace

extern "C" {

phx_status phx_allocator_register(phx_world *world, int32_t device_type, const phx_allocator_ops *ops, void *self) {
  const char *operation = "allocator_register";
  return with_live_handle(operation, world, [&](phx::World &w) -> phx_status {
    if (ops == nullptr) return fail(PHX_ERR_INVALID, operation, "ops is NULL");
    phx_allocator_ops copy = PHX_ALLOCATOR_OPS_INIT;
    PHX_TRY(phx::read_in(ops, &copy, operation));
    if (copy.name == nullptr || copy.alloc == nullptr || copy.free == nullptr || copy.export_handle == nullptr ||
        copy.import_handle == nullptr || copy.unmap == nullptr)
      return fail(PHX_ERR_INVALID, operation,
                  "a field of the allocator is NULL; name and every function except destroy must be given");
    if ((copy.flags & ~uint32_t{PHX_ALLOCATOR_DEVICE_MEMORY}) != 0)
      return fail(PHX_ERR_INVALID, operation, "flags may only have PHX_ALLOCATOR_DEVICE_MEMORY");
    w.allocators().put(device_type, std::make_shared<phx::Allocator>(copy, self));
    return PHX_OK;
  });
}

phx_status phx_allocator_unregister(phx_world *world, int32_t device_type) {
  const char *operation = "allocator_unregister";
  return with_live_handle(operation, world, [&](phx::World &w) -> phx_status {
    if (w.allocators().remove(device_type)) return PHX_OK;
    return fail(PHX_ERR_NOT_FOUND, operation, "no allocator is registered for device type %d", device_type);
  });
}

phx_status phx_mem_alloc(phx_world *world, const phx_device *device, size_t size, void **out) {
  return alloc("mem_alloc", world, device, out,
               [&](phx::BlockTable &blocks, const phx::AllocatorRef &allocator, const phx_device &where) {
                 return blocks.alloc(allocator, where, size, out);
               });
}

phx_status phx_mem_alloc_persistent(phx_world *world, const phx_device *device, size_t size, const char *scope,
                                    uint64_t alloc_id, void **out) {
  return alloc("mem_alloc_persistent", world, device, out,
               [&](phx::BlockTable &blocks, const phx::AllocatorRef &allocator, const phx_device &where) {
                 return blocks.alloc_persistent(allocator, where, size, scope != nullptr ? scope : "", alloc_id, out);
               });
}

// Memory outlives finalize, because tensors may be destroyed late: the functions below accept a finalized world.

phx_status phx_mem_retain(phx_world *world, void *pointer) {
  return with_handle("mem_retain", world, [&](phx::World &w) { return w.blocks().retain(pointer); });
}

phx_status phx_mem_free(phx_world *world, void *pointer) {
  return with_handle("mem_free", world, [&](phx::World &w) {
    phx::BlockRef gone;
    const phx_status status = w.blocks().free(pointer, &gone);
    if (gone) forget(w, *gone);
    return status;
  });
}

phx_status phx_mem_drop(phx_world *world, const phx_device *device, const char *scope, uint64_t alloc_id) {
  return with_handle("mem_drop", world, [&](phx::World &w) {
    phx::BlockRef gone;
    const phx_status status =
        w.blocks().drop(device != nullptr ? *device : kCpu, scope != nullptr ? scope : "", alloc_id, &gone);
    if (gone) forget(w, *gone);
    return status;
  });
}

phx_status phx_mem_find(phx_world *world, const void *pointer, phx_mem_info *out) {
  return with_handle("mem_find", world, [&](phx::World &w) { return w.blocks().info(pointer, out); });
}

phx_status phx_mem_count(phx_world *world, size_t *blocks, size_t *bytes) {
  return with_handle("mem_count", world, [&](phx::World &w) -> phx_status {
    if (blocks == nullptr || bytes == nullptr) return fail(PHX_ERR_INVALID, "mem_count", "blocks or bytes is NULL");
    w.blocks().count(blocks, bytes);
    return PHX_OK;
  });
}
}
