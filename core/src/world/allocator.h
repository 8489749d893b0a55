// Allocators by device type, and the blocks that come from them.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "phalanx/phalanx.h"

namespace phx {

// Functions that a caller has registered, and the object that they are called for. `End`: called once for it, if it is
// not NULL.
template <class Ops, void (*Ops::*End)(void *)>
class Registered {
 public:
  Registered(const Ops &ops, void *self) : ops_(ops), self_(self) {}
  Registered(const Registered &) = delete;
  ~Registered() {
    if (ops_.*End != nullptr) (ops_.*End)(self_);
  }
  const Ops &ops() const { return ops_; }
  void *self() const { return self_; }

 private:
  const Ops ops_;
  void *const self_;
};

// Blocks keep it alive, so that replacing or unregistering it never strands them.
using Allocator = Registered<phx_allocator_ops, &phx_allocator_ops::destroy>;
using AllocatorRef = std::shared_ptr<Allocator>;

class AllocatorRegistry {
 public:
  AllocatorRegistry();
  // NULL: none. Returns whether there was one.
  bool put(int32_t device_type, AllocatorRef allocator);
  // NULL, with the error "does not support device type", when there is none.
  // A maker makes the allocator of a device type when it is first asked for, which may start a driver. It returns NULL
  // where there is none, and *problem says why.
  using Maker = AllocatorRef (*)(std::string *problem);
  void make_on_demand(int32_t device_type, const char *device_name, Maker maker);
  AllocatorRef get(int32_t device_type, const char *operation);

 private:
  struct Entry {
    AllocatorRef allocator;  // NULL: not made yet
    const char *device_name = nullptr;
    Maker maker = nullptr;  // until an allocator of that type is registered or removed
  };
  std::mutex mutex_;
  std::map<int32_t, Entry> by_type_;
};

// Memory of this rank that can be shared. Freed with the last reference: the table's, or a symmetric handle's.
struct Block {
  const AllocatorRef allocator;
  const phx_device device;
  const size_t size;  // as asked for
  void *base = nullptr;
  uint64_t cookie = 0;
  uint64_t serial = 0;    // unique in the process of this world: never used again, unlike addresses
  bool imported = false;  // a peer's, mapped here by a fabric handle
  bool persistent = false;
  uint64_t alloc_id = 0;
  int64_t references = 1;  // of the user; guarded by the table's mutex
  bool live() const { return references > 0; }
  size_t span() const { return size == 0 ? 1 : size; }
  bool on_device() const { return (allocator->ops().flags & PHX_ALLOCATOR_DEVICE_MEMORY) != 0; }

  Block(AllocatorRef from, const phx_device &on, size_t bytes) : allocator(std::move(from)), device(on), size(bytes) {}
  Block(const Block &) = delete;
  ~Block();
};
using BlockRef = std::shared_ptr<Block>;

// All blocks of one world. Thread-safe.
class BlockTable {
 public:
  phx_status alloc(const AllocatorRef &allocator, const phx_device &device, size_t size, void **out);
  phx_status alloc_persistent(const AllocatorRef &allocator, const phx_device &device, size_t size,
                              const std::string &scope, uint64_t alloc_id, void **out);
  // A peer's memory, as the functions of that allocator know it: theirs to free, also when this fails.
  phx_status adopt(const AllocatorRef &allocator, const phx_device &device, void *base, uint64_t cookie, size_t size);
  phx_status retain(const void *pointer);
  // *gone: the block, if this freed it (then caches must forget it).
  phx_status free(const void *pointer, BlockRef *gone);
  phx_status drop(const phx_device &device, const std::string &scope, uint64_t alloc_id, BlockRef *gone);
  BlockRef find(const void *pointer) const;  // any interior pointer; NULL if none
  phx_status info(const void *pointer, phx_mem_info *out) const;
  void count(size_t *blocks, size_t *bytes) const;

 private:
  using PersistentKey = std::tuple<int32_t, int32_t, std::string, uint64_t>;

  phx_status reuse(Block &block, size_t size, const char *operation, void **out);
  phx_status make(const AllocatorRef &allocator, const phx_device &device, size_t size, const char *operation,
                  BlockRef *out);
  BlockRef find_locked(const void *pointer) const;
  BlockRef find_live_locked(const char *operation, const void *pointer) const;  // NULL, with an error, if there is none
  void add_locked(BlockRef block);

  mutable std::mutex mutex_;
  std::map<uintptr_t, BlockRef> by_address_;
  std::map<PersistentKey, BlockRef> persistent_;  // NULL: its pages are being made, outside of the lock
  std::condition_variable made_;                  // a persistent block, or not
  uint64_t next_serial_ = 1;
};

}  // namespace phx
