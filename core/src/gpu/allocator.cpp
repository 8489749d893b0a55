// The CUDA allocator: one piece of physical memory per block, made by the driver's virtual memory API and passed to
// peers as a file descriptor, as a memfd is.
#include "gpu/allocator.h"

#include <cstring>

#include "base/error.h"
#include "gpu/memory.h"

namespace phx::cuda {
namespace {

Gpus &gpus(void *self) { return *static_cast<Gpus *>(self); }
Memory *memory_of(uint64_t cookie) { return static_cast<Memory *>(pointer_of(cookie)); }

phx_status allocate(void *self, const phx_device *device, size_t size, void **pointer, uint64_t *cookie) {
  MemoryPtr memory;
  const phx_status status = Memory::make("mem_alloc", gpus(self), device->index, size, &memory);
  if (status == PHX_OK) hand_over(std::move(memory), pointer, cookie);
  return status;
}

phx_status release(void *, void *, uint64_t cookie) {
  delete memory_of(cookie);
  return PHX_OK;
}

// The handle has the size to map, because the GPUs of peers may have another granularity.
phx_status export_memory(void *, void *, uint64_t cookie, void *handle, size_t *handle_size, int32_t *fd) {
  const uint64_t span = memory_of(cookie)->span();
  std::memcpy(handle, &span, sizeof span);
  *handle_size = sizeof span;
  return memory_of(cookie)->export_fd("symm_rendezvous", fd);
}

phx_status import_memory(void *self, const phx_device *device, const void *handle, size_t handle_size, int32_t fd,
                         size_t size, void **pointer, uint64_t *cookie) {
  const char *const operation = "symm_rendezvous";
  uint64_t span = 0;
  if (handle_size == sizeof span) std::memcpy(&span, handle, sizeof span);
  if (span == 0 || span < size)
    return fail(PHX_ERR_ABI, operation, "memory of a GPU came with a handle that does not say how large it is");
  MemoryPtr memory;
  const phx_status status = Memory::import(operation, gpus(self), device->index, fd, span, &memory);
  if (status == PHX_OK) hand_over(std::move(memory), pointer, cookie);
  return status;
}

void destroy(void *self) { delete static_cast<Gpus *>(self); }

}  // namespace

Gpus *gpus_of(const Allocator &allocator) {
  return allocator.ops().alloc == allocate ? static_cast<Gpus *>(allocator.self()) : nullptr;
}

void hand_over(MemoryPtr memory, void **pointer, uint64_t *cookie) {
  *pointer = pointer_of(memory->pointer());
  *cookie = reinterpret_cast<uintptr_t>(memory.release());
}

const Memory &memory_of(const Block &block) { return *memory_of(block.cookie); }

AllocatorRef make_allocator(std::string *problem) {
  const Driver *driver = find_driver(problem);
  if (driver == nullptr) return nullptr;
  phx_allocator_ops ops{};
  ops.struct_size = sizeof ops;
  ops.flags = PHX_ALLOCATOR_DEVICE_MEMORY;
  ops.name = "cuda";
  ops.alloc = allocate;
  ops.free = release;
  ops.export_handle = export_memory;
  ops.import_handle = import_memory;
  ops.unmap = release;
  ops.destroy = destroy;
  return std::make_shared<Allocator>(ops, new Gpus(*driver));
}

}  // namespace phx::cuda
