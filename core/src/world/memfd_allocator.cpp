// The CPU allocator: one sealed memfd per block.
#include <memory>
#include <new>

#include "base/error.h"
#include "base/shared_memory.h"
#include "world/allocator.h"

namespace phx {
namespace {

struct Entry {
  Fd fd;  // invalid for imported memory
  SharedMappingRef mapping;
};

// A cookie is the address of its Entry, so the allocator itself has no state.
phx_status allocate(void *, const phx_device *device, size_t size, void **pointer, uint64_t *cookie) {
  const char *operation = "mem_alloc";
  if (device->index != 0)
    return fail(PHX_ERR_INVALID, operation, "CPU memory has device index 0, not %d", device->index);
  const size_t span = round_up(size == 0 ? 1 : size, page_bytes());
  std::unique_ptr<Entry> entry(new (std::nothrow) Entry);
  if (!entry) return fail(PHX_ERR_NO_MEMORY, operation, "out of memory");
  phx_status status = create_segment(operation, "phalanx", span, &entry->fd);
  if (status != PHX_OK) return status;
  status = map_segment(operation, entry->fd.get(), span, span, &entry->mapping);
  if (status != PHX_OK) return status;
  *pointer = entry->mapping->base;
  *cookie = reinterpret_cast<uintptr_t>(entry.release());
  return PHX_OK;
}

phx_status release(void *, void *, uint64_t cookie) {
  delete reinterpret_cast<Entry *>(static_cast<uintptr_t>(cookie));
  return PHX_OK;
}

phx_status export_memory(void *, void *, uint64_t cookie, void *, size_t *handle_size, int32_t *fd) {
  *handle_size = 0;
  *fd = reinterpret_cast<Entry *>(static_cast<uintptr_t>(cookie))->fd.get();
  return PHX_OK;
}

phx_status import_memory(void *, const phx_device *, const void *, size_t, int32_t fd, size_t size, void **pointer,
                         uint64_t *cookie) {
  const char *operation = "symm_rendezvous";
  const size_t span = round_up(size == 0 ? 1 : size, page_bytes());
  phx_status status = verify_segment(operation, fd, span);
  if (status != PHX_OK) return status;
  std::unique_ptr<Entry> entry(new (std::nothrow) Entry);
  if (!entry) return fail(PHX_ERR_NO_MEMORY, operation, "out of memory");
  status = map_segment(operation, fd, span, span, &entry->mapping);
  if (status != PHX_OK) return status;
  *pointer = entry->mapping->base;
  *cookie = reinterpret_cast<uintptr_t>(entry.release());
  return PHX_OK;
}

}  // namespace

AllocatorRef make_memfd_allocator() {
  phx_allocator_ops ops{};
  ops.struct_size = sizeof ops;
  ops.name = "memfd";
  ops.alloc = allocate;
  ops.free = release;
  ops.export_handle = export_memory;
  ops.import_handle = import_memory;
  ops.unmap = release;
  return std::make_shared<Allocator>(ops, nullptr);
}

}  // namespace phx
