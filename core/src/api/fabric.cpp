// phx_mem_export_fabric and phx_mem_import_fabric: share blocks of GPU memory beyond the host.
#include <cstring>

#include "api/entry.h"
#include "gpu/allocator.h"
#include "gpu/memory.h"
#include "phalanx/cuda.h"
#include "world/allocator.h"

using phx::fail;
using phx::with_live_handle;

namespace {

// The layout of a handle. The two sides may have different versions of this library.
struct Ticket {
  char magic[8];
  uint32_t version;
  uint32_t reserved;  // 0
  uint64_t size;      // as requested
  uint64_t span;      // of the whole allocation
  phx::cuda::FabricHandle handle;
};
static_assert(sizeof(Ticket) == PHX_FABRIC_HANDLE_BYTES);
constexpr char kMagic[8] = {'p', 'h', 'x', 'f', 'a', 'b', 'r', 'c'};
constexpr uint32_t kVersion = 1;

phx_status check_ability(const char *operation, const phx::cuda::Driver &driver, const phx::cuda::Gpu &gpu) {
  using phx::cuda::FabricAbility;
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

phx_status phx_mem_export_fabric(phx_world *world, const void *pointer, void *handle) {
  const char *operation = "mem_export_fabric";
  return with_live_handle(operation, world, [&](phx::World &w) -> phx_status {
    if (handle == nullptr) return fail(PHX_ERR_INVALID, operation, "handle is NULL");
    const phx::BlockRef block = w.blocks().find(pointer);
    if (!block || !block->live())
      return fail(PHX_ERR_NOT_FOUND, operation,
                  "%p was not allocated by phx_mem_alloc in this world, or was already freed", pointer);
    phx::cuda::Gpus *const gpus = phx::cuda::gpus_of(*block->allocator);
    if (gpus == nullptr)
      return fail(PHX_ERR_UNSUPPORTED, operation,
                  "the memory is not on a GPU, or not from Phalanx's allocator; allocate it with phx_mem_alloc on "
                  "a CUDA device");
    if (block->imported)
      return fail(PHX_ERR_INVALID, operation,
                  "the memory belongs to another rank; pass on the handle with which it was imported");
    const phx::cuda::Memory &memory = phx::cuda::memory_of(*block);
    phx_status status = check_ability(operation, gpus->driver(), memory.gpu());
    if (status != PHX_OK) return status;
    Ticket ticket{};
    std::memcpy(ticket.magic, kMagic, sizeof kMagic);
    ticket.version = kVersion;
    ticket.size = block->size;
    ticket.span = memory.span();
    status = memory.export_fabric(operation, &ticket.handle);
    if (status == PHX_OK) std::memcpy(handle, &ticket, sizeof ticket);
    return status;
  });
}

phx_status phx_mem_import_fabric(phx_world *world, const phx_device *device, const void *handle, size_t handle_size,
                                 void **out) {
  const char *operation = "mem_import_fabric";
  return with_live_handle(operation, world, [&](phx::World &w) -> phx_status {
    if (device == nullptr || out == nullptr) return fail(PHX_ERR_INVALID, operation, "device or out is NULL");
    Ticket ticket;
    phx_status status = read_ticket(operation, handle, handle_size, &ticket);
    if (status != PHX_OK) return status;
    phx::AllocatorRef allocator = w.allocators().get(device->type, operation);
    if (!allocator) return PHX_ERR_UNSUPPORTED;
    phx::cuda::Gpus *const gpus = phx::cuda::gpus_of(*allocator);
    if (gpus == nullptr)
      return fail(PHX_ERR_UNSUPPORTED, operation,
                  "only Phalanx's CUDA allocator imports fabric handles, not '%s', which serves this device; give "
                  "a CUDA device",
                  allocator->ops().name);
    phx::cuda::Gpu gpu;
    status = gpus->get(operation, device->index, &gpu);
    if (status == PHX_OK) status = check_ability(operation, gpus->driver(), gpu);
    if (status != PHX_OK) return status;
    phx::cuda::MemoryPtr memory;
    status = phx::cuda::Memory::import_fabric(operation, *gpus, device->index, ticket.handle, ticket.span, &memory);
    if (status != PHX_OK) return status;
    void *base = nullptr;
    uint64_t cookie = 0;
    phx::cuda::hand_over(std::move(memory), &base, &cookie);
    status = w.blocks().adopt(allocator, *device, base, cookie, ticket.size);
    if (status == PHX_OK) *out = base;
    return status;
  });
}
}
