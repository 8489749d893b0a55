#include "gpu/multicast.h"

#include <fcntl.h>

#include <new>

#include "base/error.h"
#include "base/shared_memory.h"

namespace phx::cuda {

phx_status MulticastObject::make(const char *operation, const Driver &driver, const Gpu &gpu, size_t devices,
                                 size_t size, MulticastPtr *out) {
  const Current current(driver, gpu.context);
  MulticastProperties properties = multicast_properties(devices, gpu.unit);
  size_t unit = 0;
  Result result = current.result();
  if (result == 0) result = driver.multicast_granularity(&unit, &properties, kSmallestGranularity);
  if (result != 0 || unit == 0)
    return failed(driver, operation, result, "asking for the granularity of multicast (cuMulticastGetGranularity)");
  properties.size = span_of(size, unit);
  MulticastPtr object(new (std::nothrow) MulticastObject(driver, gpu, properties.size));
  if (!object) return fail(PHX_ERR_NO_MEMORY, operation, "out of memory");
  result = driver.multicast_create(&object->handle_, &properties);
  if (result != 0) return failed(driver, operation, result, "making a multicast object (cuMulticastCreate)");
  object->created_ = true;
  *out = std::move(object);
  return PHX_OK;
}

phx_status MulticastObject::import(const char *operation, const Driver &driver, const Gpu &gpu, int fd, size_t span,
                                   MulticastPtr *out) {
  if (fd < 0 || span == 0)
    return fail(PHX_ERR_ABI, operation, "a multicast object came without a file descriptor or a size");
  MulticastPtr object(new (std::nothrow) MulticastObject(driver, gpu, span));
  if (!object) return fail(PHX_ERR_NO_MEMORY, operation, "out of memory");
  void *const handle = reinterpret_cast<void *>(static_cast<intptr_t>(fd));
  PHX_TRY(object->import_shared(operation, handle, kFileDescriptor, "the multicast object"));
  *out = std::move(object);
  return PHX_OK;
}

phx_status MulticastObject::export_fd(const char *operation, Fd *out) const {
  int exported = -1;
  PHX_TRY(export_shared(operation, &exported, kFileDescriptor, "the multicast object"));
  *out = Fd(exported);
  fcntl(exported, F_SETFD, FD_CLOEXEC);
  return PHX_OK;
}

phx_status MulticastObject::add(const char *operation) {
  return on_gpu(operation, driver_, gpu_.context, "adding the GPU to the multicast object (cuMulticastAddDevice)",
                [&] { return driver_.multicast_add(handle_, gpu_.device); });
}

phx_status MulticastObject::bind(const char *operation, const Memory &memory) {
  if (memory.span() < span_)
    return fail(PHX_ERR_UNSUPPORTED, operation,
                "the block has %zu bytes of memory, and multicast to so many GPUs takes pieces of %zu", memory.span(),
                span_);
  PHX_TRY(on_gpu(operation, driver_, gpu_.context, "binding the memory to the multicast object (cuMulticastBindMem)",
                 [&] { return driver_.multicast_bind(handle_, 0, memory.handle(), 0, span_, 0); }));
  bound_ = true;
  return map(operation, gpu_.unit, "reserving addresses for multicast (cuMemAddressReserve)", "the multicast object");
}

}  // namespace phx::cuda
