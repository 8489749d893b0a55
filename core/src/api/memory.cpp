// Implements phx_allocator_* and phx_mem_*.
#include <cstring>

#include "api/entry.h"
#include "gpu/memory.h"
#include "symm/table.h"

using namespace phx;

namespace {

constexpr phx_device kCpu{PHX_DEVICE_CPU, 0};

// Drops the symmetric allocations with a block that was freed.
void forget(const World &world, const Block &block) {
  for (const auto &group : groups_of(world)) symms_of(*group).forget(block.serial);
}

// Finds the allocator of `device` (NULL: the CPU), with which `take` gets a block from the table of the world.
template <class Take>
phx_status alloc(const char *operation, phx_world *world, const phx_device *device, void **out, const Take &take) {
  return with_live_handle(operation, world, [&](World &w) -> phx_status {
    if (out == nullptr) return fail(PHX_ERR_INVALID, operation, "out is NULL");
    const phx_device where = device != nullptr ? *device : kCpu;
    const AllocatorRef allocator = w.allocators().get(where.type, operation);
    return allocator ? take(w.blocks(), allocator, where) : PHX_ERR_UNSUPPORTED;
  });
}

// ---- memory of GPUs that is shared beyond the host

// The layout of a fabric handle. The two sides may have different versions of this library.
struct Ticket {
  char magic[8];
  uint32_t version;
  uint32_t reserved;  // 0
  uint64_t size;      // as requested
  uint64_t span;      // of the whole allocation
  cuda::FabricHandle handle;
};
static_assert(sizeof(Ticket) == PHX_FABRIC_HANDLE_BYTES);
constexpr char kMagic[8] = {'p', 'h', 'x', 'f', 'a', 'b', 'r', 'c'};
constexpr uint32_t kVersion = 1;

phx_status check_ability(const char *operation, const cuda::Driver &driver, const cuda::Gpu &gpu) {
  using cuda::FabricAbility;
  if (gpu.fabric == FabricAbility::kCan) return PHX_OK;
  if (gpu.fabric == FabricAbility::kNone)
    return fail(PHX_ERR_UNSUPPORTED, operation, "CUDA device %d, or its driver, has no fabric handles", gpu.index);
  const char *name = nullptr;
  driver.get_error_name(gpu.fabric_refusal, &name);
  return fail(PHX_ERR_UNSUPPORTED, operation,
              "the driver gives no fabric handles of CUDA device %d (%s): the host needs the service nvidia-imex, "
              "and this process the right to a channel of it (/dev/nvidia-caps-imex-channels)",
              gpu.index, name != nullptr ? name : "unknown error");
}

phx_status read_ticket(const char *operation, const void *bytes, size_t size, Ticket *out) {
  if (bytes == nullptr || size != sizeof *out)
    return fail(PHX_ERR_INVALID, operation, "the handle has %zu bytes instead of %zu",
                bytes == nullptr ? size_t{0} : size, sizeof *out);
  std::memcpy(out, bytes, sizeof *out);
  if (std::memcmp(out->magic, kMagic, sizeof kMagic) != 0)
    return fail(PHX_ERR_INVALID, operation,
                "these bytes are not a handle of phx_mem_export_fabric; pass the bytes that it gave, unchanged");
  if (out->version != kVersion)
    return fail(
        PHX_ERR_ABI, operation,
        "the handle has layout version %u, but this library reads %u; use one build of phalanx-core on both sides",
        out->version, kVersion);
  if (out->span == 0 || out->span < out->size || out->span > static_cast<uint64_t>(INT64_MAX))
    return fail(PHX_ERR_INVALID, operation, "the handle does not say how large its memory is");
  return PHX_OK;
}

}  // namespace

extern "C" {

phx_status phx_allocator_register(phx_world *world, int32_t device_type, const phx_allocator_ops *ops, void *self) {
  return with_live_handle("allocator_register", world, [&](World &w, const char *operation) -> phx_status {
    if (ops == nullptr) return fail(PHX_ERR_INVALID, operation, "ops is NULL");
    phx_allocator_ops copy = PHX_ALLOCATOR_OPS_INIT;
    PHX_TRY(read_in(ops, &copy, operation));
    if (copy.name == nullptr || copy.alloc == nullptr || copy.free == nullptr || copy.export_handle == nullptr ||
        copy.import_handle == nullptr || copy.unmap == nullptr)
      return fail(PHX_ERR_INVALID, operation,
                  "a field of the allocator is NULL; name and every function except destroy must be given");
    if ((copy.flags & ~uint32_t{PHX_ALLOCATOR_DEVICE_MEMORY}) != 0)
      return fail(PHX_ERR_INVALID, operation, "flags may only have PHX_ALLOCATOR_DEVICE_MEMORY");
    w.allocators().put(device_type, std::make_shared<Allocator>(copy, self));
    return PHX_OK;
  });
}

phx_status phx_allocator_unregister(phx_world *world, int32_t device_type) {
  return with_live_handle("allocator_unregister", world, [&](World &w, const char *operation) -> phx_status {
    if (w.allocators().put(device_type, nullptr)) return PHX_OK;
    return fail(PHX_ERR_NOT_FOUND, operation, "no allocator is registered for device type %d", device_type);
  });
}

phx_status phx_mem_alloc(phx_world *world, const phx_device *device, size_t size, void **out) {
  return alloc("mem_alloc", world, device, out,
               [&](BlockTable &blocks, const AllocatorRef &allocator, const phx_device &where) {
                 return blocks.alloc(allocator, where, size, out);
               });
}

phx_status phx_mem_alloc_persistent(phx_world *world, const phx_device *device, size_t size, const char *scope,
                                    uint64_t alloc_id, void **out) {
  return alloc("mem_alloc_persistent", world, device, out,
               [&](BlockTable &blocks, const AllocatorRef &allocator, const phx_device &where) {
                 return blocks.alloc_persistent(allocator, where, size, scope != nullptr ? scope : "", alloc_id, out);
               });
}

// Memory outlives finalize, because tensors may be destroyed late: the functions below accept a finalized world.

phx_status phx_mem_retain(phx_world *world, void *pointer) {
  return with_handle("mem_retain", world, [&](World &w) { return w.blocks().retain(pointer); });
}

phx_status phx_mem_free(phx_world *world, void *pointer) {
  return with_handle("mem_free", world, [&](World &w) {
    BlockRef gone;
    const phx_status status = w.blocks().free(pointer, &gone);
    if (gone) forget(w, *gone);
    return status;
  });
}

phx_status phx_mem_drop(phx_world *world, const phx_device *device, const char *scope, uint64_t alloc_id) {
  return with_handle("mem_drop", world, [&](World &w) {
    BlockRef gone;
    const phx_status status =
        w.blocks().drop(device != nullptr ? *device : kCpu, scope != nullptr ? scope : "", alloc_id, &gone);
    if (gone) forget(w, *gone);
    return status;
  });
}

phx_status phx_mem_find(phx_world *world, const void *pointer, phx_mem_info *out) {
  return with_handle("mem_find", world, [&](World &w) { return w.blocks().info(pointer, out); });
}

phx_status phx_mem_count(phx_world *world, size_t *blocks, size_t *bytes) {
  return with_handle("mem_count", world, [&](World &w) -> phx_status {
    if (blocks == nullptr || bytes == nullptr) return fail(PHX_ERR_INVALID, "mem_count", "blocks or bytes is NULL");
    w.blocks().count(blocks, bytes);
    return PHX_OK;
  });
}

phx_status phx_mem_export_fabric(phx_world *world, const void *pointer, void *handle) {
  return with_live_handle("mem_export_fabric", world, [&](World &w, const char *operation) -> phx_status {
    if (handle == nullptr) return fail(PHX_ERR_INVALID, operation, "handle is NULL");
    const BlockRef block = w.blocks().find(pointer);
    if (!block || !block->live())
      return fail(PHX_ERR_NOT_FOUND, operation,
                  "%p was not allocated by phx_mem_alloc in this world, or was already freed", pointer);
    cuda::Gpus *const gpus = cuda::gpus_of(*block->allocator);
    if (gpus == nullptr)
      return fail(PHX_ERR_UNSUPPORTED, operation,
                  "the memory is not on a GPU, or not from Phalanx's allocator; allocate it with phx_mem_alloc on "
                  "a CUDA device");
    if (block->imported)
      return fail(PHX_ERR_INVALID, operation,
                  "the memory belongs to another rank; pass on the handle with which it was imported");
    const cuda::Memory &memory = cuda::memory_of(*block);
    PHX_TRY(check_ability(operation, gpus->driver(), memory.gpu()));
    Ticket ticket{};
    std::memcpy(ticket.magic, kMagic, sizeof kMagic);
    ticket.version = kVersion;
    ticket.size = block->size;
    ticket.span = memory.span();
    PHX_TRY(memory.export_fabric(operation, &ticket.handle));
    std::memcpy(handle, &ticket, sizeof ticket);
    return PHX_OK;
  });
}

phx_status phx_mem_import_fabric(phx_world *world, const phx_device *device, const void *handle, size_t handle_size,
                                 void **out) {
  return with_live_handle("mem_import_fabric", world, [&](World &w, const char *operation) -> phx_status {
    if (device == nullptr || out == nullptr) return fail(PHX_ERR_INVALID, operation, "device or out is NULL");
    Ticket ticket;
    PHX_TRY(read_ticket(operation, handle, handle_size, &ticket));
    AllocatorRef allocator = w.allocators().get(device->type, operation);
    if (!allocator) return PHX_ERR_UNSUPPORTED;
    cuda::Gpus *const gpus = cuda::gpus_of(*allocator);
    if (gpus == nullptr)
      return fail(PHX_ERR_UNSUPPORTED, operation,
                  "only Phalanx's CUDA allocator imports fabric handles, not '%s', which serves this device; give "
                  "a CUDA device",
                  allocator->ops().name);
    cuda::Gpu gpu;
    PHX_TRY(gpus->get(operation, device->index, &gpu));
    PHX_TRY(check_ability(operation, gpus->driver(), gpu));
    cuda::MemoryPtr memory;
    PHX_TRY(cuda::Memory::import_fabric(operation, *gpus, device->index, ticket.handle, ticket.span, &memory));
    void *base = nullptr;
    uint64_t cookie = 0;
    cuda::hand_over(std::move(memory), &base, &cookie);
    PHX_TRY(w.blocks().adopt(allocator, *device, base, cookie, ticket.size));
    *out = base;
    return PHX_OK;
  });
}
}
