// Physical memory of a GPU that is mapped for one: made here, or received from a peer as a file descriptor.
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

// In the pieces that memory of that GPU comes in, at least one.
size_t span_of(size_t size, size_t unit);

class Memory;
using MemoryPtr = std::unique_ptr<Memory>;

class Memory {
 public:
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  // Errors are of no use here: a driver that is shutting down gives everything back by itself.
  ~Memory();

  // `size` bytes of zeros on that GPU.
  static phx_status make(const char *operation, Gpus &gpus, int32_t index, size_t size, MemoryPtr *out);
  // A peer's, all `span` bytes of it, mapped for that GPU, whichever they are on. The driver refuses to map more than
  // there is.
  static phx_status import(const char *operation, Gpus &gpus, int32_t index, int fd, size_t span, MemoryPtr *out);

  // The same by a fabric handle; the peer may be on another host.
  static phx_status import_fabric(const char *operation, Gpus &gpus, int32_t index, const FabricHandle &given,
                                  size_t span, MemoryPtr *out);

  Pointer pointer() const { return pointer_; }
  Handle handle() const { return handle_; }
  size_t span() const { return span_; }
  const Gpu &gpu() const { return gpu_; }
  // The descriptor stays this object's.
  phx_status export_fd(const char *operation, int *fd);
  phx_status export_fabric(const char *operation, FabricHandle *out) const;
  // On a stream of its own, which waits for nobody's kernels. Returns when the bytes are there.
  phx_status write(const char *operation, size_t offset, const void *from, size_t bytes) const;

 private:
  Memory(const Driver &driver, const Gpu &gpu, size_t span) : driver_(driver), gpu_(gpu), span_(span) {}
  static phx_status import_handle(const char *operation, Gpus &gpus, int32_t index, void *given, int kind, size_t span,
                                  MemoryPtr *out);
  static phx_status begin(const char *operation, const Gpus &gpus, const Gpu &gpu, size_t span, MemoryPtr *out);
  phx_status map(const char *operation);
  template <class Fill>
  phx_status fill(const char *operation, const char *what, Fill fill) const;

  // Undone in the reverse order, as far as it got.
  const Driver &driver_;
  const Gpu gpu_;
  const size_t span_;
  Handle handle_ = 0;
  bool created_ = false;
  Pointer pointer_ = 0;  // 0: no addresses are reserved
  bool mapped_ = false;
  std::mutex mutex_;
  Fd fd_;  // of the handle, once a peer wants it
};

}  // namespace phx::cuda
