// Physical memory of a GPU that is mapped for a GPU of this process. It is allocated here, or received from a peer as a
// file descriptor or a fabric handle.
//
// A descriptor keeps the physical memory alive, and so does a mapping: a peer can go on using a block that its owner
// has freed, or whose owner has died.
#pragma once

#include <memory>
#include <mutex>

#include "base/fd.h"
#include "gpu/gpu.h"
#include "phalanx/cuda.h"

namespace phx::cuda {

// `size` rounded up to the granularity of a GPU's memory, and at least one unit of it.
size_t span_of(size_t size, size_t unit);

class Memory;
using MemoryPtr = std::unique_ptr<Memory>;

class Memory {
 public:
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  // Ignores errors, because a driver that is shutting down releases everything by itself.
  ~Memory();

  // Allocates `size` bytes of zeros on a GPU.
  static phx_status make(const char *operation, Gpus &gpus, int32_t index, size_t size, MemoryPtr *out);
  // Maps all `span` bytes of a peer's memory, on whichever GPU, for a GPU. The driver refuses to map more than there
  // is.
  static phx_status import(const char *operation, Gpus &gpus, int32_t index, int fd, size_t span, MemoryPtr *out);

  // The same by a fabric handle; the peer may be on another host.
  static phx_status import_fabric(const char *operation, Gpus &gpus, int32_t index, const FabricHandle &handle,
                                  size_t span, MemoryPtr *out);

  Pointer pointer() const { return pointer_; }
  Handle handle() const { return handle_; }
  size_t span() const { return span_; }
  const Gpu &gpu() const { return gpu_; }
  // This object keeps the ownership of the descriptor.
  phx_status export_fd(const char *operation, int *fd);
  phx_status export_fabric(const char *operation, FabricHandle *out) const;
  // Writes on a separate stream, which waits for no kernel. Returns when the bytes are in the memory.
  phx_status write(const char *operation, size_t offset, const void *from, size_t bytes) const;

 private:
  Memory(const Driver &driver, const Gpu &gpu, size_t span) : driver_(driver), gpu_(gpu), span_(span) {}
  static phx_status import_handle(const char *operation, Gpus &gpus, int32_t index, void *handle, int kind, size_t span,
                                  MemoryPtr *out);
  static phx_status begin(const char *operation, const Gpus &gpus, const Gpu &gpu, size_t span, MemoryPtr *out);
  phx_status map(const char *operation);
  template <class Fill>
  phx_status fill(const char *operation, const char *action, Fill fill) const;

  // The destructor undoes these steps in the reverse order, as far as they were taken.
  const Driver &driver_;
  const Gpu gpu_;
  const size_t span_;
  Handle handle_ = 0;
  bool created_ = false;
  Pointer pointer_ = 0;  // 0: no addresses are reserved
  bool mapped_ = false;
  std::mutex mutex_;
  Fd fd_;  // exports the handle, once a peer needs it
};

}  // namespace phx::cuda
