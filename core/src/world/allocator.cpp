// The allocator of the CPU, one sealed memfd per block, and the registry of allocators by device type.
#include "world/allocator.h"

#include <new>

#include "base/error.h"
#include "base/shared_memory.h"

namespace phx {
namespace {

struct MemfdBlock {
  Fd fd;  // invalid for imported memory
  SharedMappingRef mapping;
};

size_t span_of(size_t size) { return round_up(size == 0 ? 1 : size, page_bytes()); }

// A cookie is the address of its MemfdBlock, so the allocator itself has no state.
MemfdBlock *block_of(uint64_t cookie) { return reinterpret_cast<MemfdBlock *>(static_cast<uintptr_t>(cookie)); }

// Maps the segment `fd`. `own`: the same, to be closed with the block, or none.
phx_status map_block(const char *operation, int fd, Fd own, size_t span, void **pointer, uint64_t *cookie) {
  std::unique_ptr<MemfdBlock> block(new (std::nothrow) MemfdBlock{std::move(own), {}});
  if (!block) return fail(PHX_ERR_NO_MEMORY, operation, "out of memory");
  PHX_TRY(map_segment(operation, fd, span, span, &block->mapping));
  *pointer = block->mapping->base;
  *cookie = reinterpret_cast<uintptr_t>(block.release());
  return PHX_OK;
}

phx_status allocate_memfd(void *, const phx_device *device, size_t size, void **pointer, uint64_t *cookie) {
  const char *operation = "mem_alloc";
  if (device->index != 0)
    return fail(PHX_ERR_INVALID, operation, "CPU memory has device index 0, not %d", device->index);
  Fd made;
  PHX_TRY(create_segment(operation, "phalanx", span_of(size), &made));
  const int fd = made.get();
  return map_block(operation, fd, std::move(made), span_of(size), pointer, cookie);
}

phx_status release_memfd(void *, void *, uint64_t cookie) {
  delete block_of(cookie);
  return PHX_OK;
}

phx_status export_memfd(void *, void *, uint64_t cookie, void *, size_t *handle_size, int32_t *fd) {
  *handle_size = 0;
  *fd = block_of(cookie)->fd.get();
  return PHX_OK;
}

phx_status import_memfd(void *, const phx_device *, const void *, size_t, int32_t fd, size_t size, void **pointer,
                        uint64_t *cookie) {
  const char *operation = "symm_rendezvous";
  PHX_TRY(verify_segment(operation, fd, span_of(size)));
  return map_block(operation, fd, Fd(), span_of(size), pointer, cookie);
}

}  // namespace

AllocatorRegistry::AllocatorRegistry() {
  phx_allocator_ops ops{};
  ops.struct_size = sizeof ops;
  ops.name = "memfd";
  ops.alloc = allocate_memfd;
  ops.free = release_memfd;
  ops.export_handle = export_memfd;
  ops.import_handle = import_memfd;
  ops.unmap = release_memfd;
  by_type_[PHX_DEVICE_CPU].allocator = std::make_shared<Allocator>(ops, nullptr);
}

void AllocatorRegistry::put(int32_t device_type, AllocatorRef allocator) {
  Entry previous;  // destroyed after the lock is gone: the destructor of its allocator may call out
  std::lock_guard<std::mutex> lock(mutex_);
  previous = std::exchange(by_type_[device_type], {std::move(allocator)});
}

void AllocatorRegistry::make_on_demand(int32_t device_type, const char *device_name, Maker maker) {
  std::lock_guard<std::mutex> lock(mutex_);
  by_type_[device_type] = {nullptr, device_name, maker};
}

bool AllocatorRegistry::remove(int32_t device_type) {
  Entry previous;
  std::lock_guard<std::mutex> lock(mutex_);
  previous = std::exchange(by_type_[device_type], {});
  return previous.allocator != nullptr;
}

AllocatorRef AllocatorRegistry::get(int32_t device_type, const char *operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  Entry &entry = by_type_[device_type];
  std::string why;
  if (!entry.allocator && entry.maker != nullptr) {
    entry.allocator = entry.maker(&why);
    why = std::string(" (") + entry.device_name + ") here: " + why;
  }
  if (entry.allocator) return entry.allocator;
  fail(PHX_ERR_UNSUPPORTED, operation,
       "SymmetricMemory does not support device type %d%s; register an allocator for it (phx_allocator_register) "
       "or use CPU memory (device type 1)",
       device_type, why.c_str());
  return nullptr;
}

Block::~Block() {
  if (base != nullptr) (imported ? allocator->ops().unmap : allocator->ops().free)(allocator->self(), base, cookie);
}

}  // namespace phx
