// Physical memory of a GPU that is mapped for a GPU of this process. It is allocated here, or received from a peer as a
// file descriptor or a fabric handle.
//
// A descriptor keeps the physical memory alive, and so does a mapping: a peer can go on using a block that its owner
// has freed, or whose owner has died.
//
// The allocator of CUDA memory makes one piece of it for each block, by the driver's virtual memory API.
#pragma once

#include "base/fd.h"
#include "gpu/gpu.h"
#include "world/allocator.h"

namespace phx::cuda {

// `size` rounded up to the granularity of a GPU's memory, and at least one unit of it.
size_t span_of(size_t size, size_t unit);

// A handle of the driver, and the addresses at which it is mapped.
class MappedHandle {
 public:
  MappedHandle(const MappedHandle &) = delete;
  MappedHandle &operator=(const MappedHandle &) = delete;
  Pointer pointer() const { return pointer_; }
  size_t span() const { return span_; }
  const Gpu &gpu() const { return gpu_; }

 protected:
  MappedHandle(const Driver &driver, const Gpu &gpu, size_t span) : driver_(driver), gpu_(gpu), span_(span) {}
  // Ignores errors, because a driver that is shutting down releases everything by itself.
  ~MappedHandle();
  // `thing` and `reserving` are for the texts of errors.
  phx_status import_shared(const char *operation, void *handle, int kind, const char *thing);
  phx_status export_shared(const char *operation, void *out, int kind, const char *thing) const;
  phx_status map(const char *operation, size_t alignment, const char *reserving, const char *thing);

  // The destructor undoes these steps in the reverse order, as far as they were taken.
  const Driver &driver_;
  const Gpu gpu_;
  const size_t span_;
  Handle handle_ = 0;
  bool created_ = false;
  bool bound_ = false;   // of a multicast object: memory of this GPU is part of it
  Pointer pointer_ = 0;  // 0: no addresses are reserved
  bool mapped_ = false;
};

class Memory;
using MemoryPtr = std::unique_ptr<Memory>;

class Memory : public MappedHandle {
 public:
  // Allocates `size` bytes of zeros on a GPU.
  static phx_status make(const char *operation, Gpus &gpus, int32_t index, size_t size, MemoryPtr *out);
  // Maps all `span` bytes of a peer's memory, on whichever GPU, for a GPU. The driver refuses to map more than there
  // is.
  static phx_status import(const char *operation, Gpus &gpus, int32_t index, int fd, size_t span, MemoryPtr *out);

  // The same by a fabric handle; the peer may be on another host.
  static phx_status import_fabric(const char *operation, Gpus &gpus, int32_t index, const FabricHandle &handle,
                                  size_t span, MemoryPtr *out);

  Handle handle() const { return handle_; }
  // This object keeps the ownership of the descriptor.
  phx_status export_fd(const char *operation, int *fd);
  phx_status export_fabric(const char *operation, FabricHandle *out) const;
  // Writes on a separate stream, which waits for no kernel. Returns when the bytes are in the memory.
  phx_status write(const char *operation, size_t offset, const void *from, size_t bytes) const;

 private:
  using MappedHandle::MappedHandle;
  static phx_status import_handle(const char *operation, Gpus &gpus, int32_t index, void *handle, int kind, size_t span,
                                  MemoryPtr *out);
  static phx_status begin(const char *operation, const Gpus &gpus, const Gpu &gpu, size_t span, MemoryPtr *out);
  phx_status map(const char *operation);
  template <class Fill>
  phx_status fill(const char *operation, const char *action, Fill fill) const;

  std::mutex mutex_;
  Fd fd_;  // exports the handle, once a peer needs it
};

// The allocator of CUDA memory. NULL, and *problem says why, if there is no driver.
AllocatorRef make_allocator(std::string *problem);
// The GPUs of an allocator from make_allocator; NULL for other allocators.
Gpus *gpus_of(const Allocator &allocator);
// The memory of a block from such an allocator.
const Memory &memory_of(const Block &block);
// Turns memory into the pointer and cookie of a block of such an allocator, which owns it from then on.
void hand_over(MemoryPtr memory, void **pointer, uint64_t *cookie);

}  // namespace phx::cuda
