// Memory of several GPUs behind one address: NVLink switches write what is stored there to all of them, and reduce what
// is loaded from there.
//
// One rank makes the object and passes it on as a file descriptor. Every rank adds its GPU. When all have, each rank
// binds its block and maps the object; the ranks synchronize before, because earlier calls would wait without a
// timeout.
#pragma once

#include "gpu/memory.h"

namespace phx::cuda {

class MulticastObject;
using MulticastPtr = std::unique_ptr<MulticastObject>;

// Precondition of its destruction: no kernel uses the object any more.
class MulticastObject : public MappedHandle {
 public:
  // Makes an object for `devices` GPUs, with blocks of `size` bytes on each.
  static phx_status make(const char *operation, const Driver &driver, const Gpu &gpu, size_t devices, size_t size,
                         MulticastPtr *out);
  // Imports the object of a peer. `span`: the span() of that object.
  static phx_status import(const char *operation, const Driver &driver, const Gpu &gpu, int fd, size_t span,
                           MulticastPtr *out);
  phx_status export_fd(const char *operation, Fd *out) const;
  phx_status add(const char *operation);  // adds the GPU of this rank
  // Binds the block of this rank and maps the object. Precondition: all GPUs have been added.
  phx_status bind(const char *operation, const Memory &memory);

 private:
  using MappedHandle::MappedHandle;
};

}  // namespace phx::cuda
