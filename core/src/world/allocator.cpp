// The allocator of the CPU, one sealed memfd per block; the registry of allocators by device type; and blocks.
#include "world/allocator.h"

#include <limits>
#include <new>

#include "base/abi.h"
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

bool AllocatorRegistry::put(int32_t device_type, AllocatorRef allocator) {
  Entry previous;  // destroyed after the lock is gone: the destructor of its allocator may call out
  std::lock_guard<std::mutex> lock(mutex_);
  previous = std::exchange(by_type_[device_type], {std::move(allocator)});
  return previous.allocator != nullptr;
}

void AllocatorRegistry::make_on_demand(int32_t device_type, const char *device_name, Maker maker) {
  std::lock_guard<std::mutex> lock(mutex_);
  by_type_[device_type] = {nullptr, device_name, maker};
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

// ---- the table of a world's blocks: ordinary ones, and persistent ones that keep their address by alloc id

phx_status BlockTable::make(const AllocatorRef &allocator, const phx_device &device, size_t size, const char *operation,
                            BlockRef *out) {
  if (size > static_cast<size_t>(std::numeric_limits<int64_t>::max()))
    return fail(PHX_ERR_INVALID, operation, "size is %zu bytes, which is more than an allocation may have", size);
  BlockRef block(new (std::nothrow) Block(allocator, device, size));
  if (!block) return fail(PHX_ERR_NO_MEMORY, operation, "out of memory");
  void *base = nullptr;
  PHX_TRY(allocator->ops().alloc(allocator->self(), &device, size, &base, &block->cookie));
  block->base = base;
  *out = std::move(block);
  return PHX_OK;
}

void BlockTable::add_locked(BlockRef block) {
  block->serial = next_serial_++;
  by_address_[reinterpret_cast<uintptr_t>(block->base)] = std::move(block);
}

phx_status BlockTable::alloc(const AllocatorRef &allocator, const phx_device &device, size_t size, void **out) {
  BlockRef block;
  PHX_TRY(make(allocator, device, size, "mem_alloc", &block));
  *out = block->base;
  std::lock_guard<std::mutex> lock(mutex_);
  add_locked(std::move(block));
  return PHX_OK;
}

phx_status BlockTable::alloc_persistent(const AllocatorRef &allocator, const phx_device &device, size_t size,
                                        const std::string &scope, uint64_t alloc_id, void **out) {
  const char *operation = "mem_alloc_persistent";
  std::unique_lock<std::mutex> lock(mutex_);
  const PersistentKey key{device.type, device.index, scope, alloc_id};
  // Another thread may be making it: two must not make two blocks of one id.
  auto found = persistent_.find(key);
  for (; found != persistent_.end() && !found->second; found = persistent_.find(key)) made_.wait(lock);
  if (found != persistent_.end()) return reuse(*found->second, size, operation, out);
  persistent_[key] = nullptr;
  lock.unlock();  // to make its pages takes long, and others look for theirs meanwhile
  BlockRef block;
  const phx_status status = make(allocator, device, size, operation, &block);
  lock.lock();
  made_.notify_all();
  if (status != PHX_OK) {
    persistent_.erase(key);
    return status;
  }
  block->persistent = true;
  block->alloc_id = alloc_id;
  *out = block->base;
  persistent_[key] = block;
  add_locked(std::move(block));
  return PHX_OK;
}

phx_status BlockTable::reuse(Block &block, size_t size, const char *operation, void **out) {
  const unsigned long long id = block.alloc_id;
  if (block.live())
    return fail_text(
        PHX_ERR_IN_USE, operation,
        "can not allocate with alloc_id == %llu because a previous allocation with the same alloc_id is still "
        "active. Let its tensors (views count) die first, or use another alloc_id.",
        id);
  if (block.size != size)
    return fail_text(
        PHX_ERR_MISMATCH, operation,
        "alloc_id %llu was allocated with %zu bytes and is now asked for with %zu. A persistent allocation keeps "
        "its size: use another alloc_id, or drop this one first.",
        id, block.size, size);
  block.references = 1;
  *out = block.base;
  return PHX_OK;
}

phx_status BlockTable::adopt(const AllocatorRef &allocator, const phx_device &device, void *base, uint64_t cookie,
                             size_t size) {
  BlockRef block(new (std::nothrow) Block(allocator, device, size));
  if (!block) {
    allocator->ops().unmap(allocator->self(), base, cookie);
    return fail(PHX_ERR_NO_MEMORY, "mem_import_fabric", "out of memory");
  }
  block->base = base;
  block->cookie = cookie;
  block->imported = true;
  std::lock_guard<std::mutex> lock(mutex_);
  add_locked(std::move(block));
  return PHX_OK;
}

BlockRef BlockTable::find_locked(const void *pointer) const {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  auto next = by_address_.upper_bound(address);
  if (next == by_address_.begin()) return nullptr;
  const BlockRef &block = std::prev(next)->second;
  return address - reinterpret_cast<uintptr_t>(block->base) < block->span() ? block : nullptr;
}

BlockRef BlockTable::find(const void *pointer) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return find_locked(pointer);
}

BlockRef BlockTable::find_live_locked(const char *operation, const void *pointer) const {
  BlockRef block = find_locked(pointer);
  if (block && block->live()) return block;
  fail(PHX_ERR_NOT_FOUND, operation, "%p was not allocated by phx_mem_alloc in this world, or was already freed",
       pointer);
  return nullptr;
}

phx_status BlockTable::retain(const void *pointer) {
  std::lock_guard<std::mutex> lock(mutex_);
  const BlockRef block = find_live_locked("mem_retain", pointer);
  if (!block) return PHX_ERR_NOT_FOUND;
  ++block->references;
  return PHX_OK;
}

phx_status BlockTable::free(const void *pointer, BlockRef *gone) {
  std::lock_guard<std::mutex> lock(mutex_);
  const BlockRef block = find_live_locked("mem_free", pointer);
  if (!block) return PHX_ERR_NOT_FOUND;
  if (--block->references > 0 || block->persistent) return PHX_OK;
  by_address_.erase(reinterpret_cast<uintptr_t>(block->base));
  *gone = block;
  return PHX_OK;
}

phx_status BlockTable::drop(const phx_device &device, const std::string &scope, uint64_t alloc_id, BlockRef *gone) {
  const unsigned long long id = alloc_id;
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = persistent_.find(PersistentKey{device.type, device.index, scope, alloc_id});
  if (found == persistent_.end() || !found->second)
    return fail(PHX_ERR_NOT_FOUND, "mem_drop", "there is no persistent allocation with alloc_id %llu", id);
  if (found->second->live())
    return fail(PHX_ERR_IN_USE, "mem_drop", "the allocation with alloc_id %llu is still active; free it first", id);
  *gone = found->second;
  by_address_.erase(reinterpret_cast<uintptr_t>((*gone)->base));
  persistent_.erase(found);
  return PHX_OK;
}

phx_status BlockTable::info(const void *pointer, phx_mem_info *out) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const BlockRef block = find_locked(pointer);
  if (!block)
    return fail(PHX_ERR_NOT_FOUND, "mem_find", "%p is not in memory that phx_mem_alloc allocated in this world",
                pointer);
  phx_mem_info info{};
  info.struct_size = sizeof info;
  info.live = block->live() ? 1 : 0;
  info.base = block->base;
  info.size = block->size;
  info.alloc_id = block->alloc_id;
  info.persistent = block->persistent ? 1 : 0;
  info.device = block->device;
  return copy_out(info, out, "mem_find");
}

void BlockTable::count(size_t *blocks, size_t *bytes) const {
  std::lock_guard<std::mutex> lock(mutex_);
  *blocks = by_address_.size();
  *bytes = 0;
  for (const auto &entry : by_address_) *bytes += entry.second->size;
}

}  // namespace phx
