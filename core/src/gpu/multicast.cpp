#include "gpu/multicast.h"

#include <fcntl.h>

#include <new>

#include "base/error.h"
#include "base/shared_memory.h"

namespace phx::cuda {

MulticastObject::~MulticastObject() {
  const Current current(driver_, gpu_.context);
  if (mapped_) driver_.unmap(pointer_, span_);
  if (pointer_ != 0) driver_.unreserve(pointer_, span_);
  if (bound_) driver_.multicast_unbind(handle_, gpu_.device, 0, span_);
  if (created_) driver_.release(handle_);
}

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
  const Current current(driver, gpu.context);
  Result result = current.result();
  if (result == 0)
    result =
        driver.import_handle(&object->handle_, reinterpret_cast<void *>(static_cast<intptr_t>(fd)), kFileDescriptor);
  if (result != 0)
    return failed(driver, operation, result, "importing the multicast object (cuMemImportFromShareableHandle)");
  object->created_ = true;
  *out = std::move(object);
  return PHX_OK;
}

phx_status MulticastObject::export_fd(const char *operation, Fd *out) const {
  int exported = -1;
  const Current current(driver_, gpu_.context);
  Result result = current.result();
  if (result == 0) result = driver_.export_handle(&exported, handle_, kFileDescriptor, 0);
  if (result != 0)
    return failed(driver_, operation, result, "sharing the multicast object (cuMemExportToShareableHandle)");
  *out = Fd(exported);
  fcntl(exported, F_SETFD, FD_CLOEXEC);
  return PHX_OK;
}

phx_status MulticastObject::add(const char *operation) {
  const Current current(driver_, gpu_.context);
  Result result = current.result();
  if (result == 0) result = driver_.multicast_add(handle_, gpu_.device);
  return result == 0
             ? PHX_OK
             : failed(driver_, operation, result, "adding the GPU to the multicast object (cuMulticastAddDevice)");
}

phx_status MulticastObject::bind(const char *operation, const Memory &memory) {
  if (memory.span() < span_)
    return fail(PHX_ERR_UNSUPPORTED, operation,
                "the block has %zu bytes of memory, and multicast to so many GPUs takes pieces of %zu", memory.span(),
                span_);
  const Current current(driver_, gpu_.context);
  Result result = current.result();
  if (result == 0) result = driver_.multicast_bind(handle_, 0, memory.handle(), 0, span_, 0);
  if (result != 0)
    return failed(driver_, operation, result, "binding the memory to the multicast object (cuMulticastBindMem)");
  bound_ = true;
  result = driver_.reserve(&pointer_, span_, gpu_.unit, 0, 0);
  if (result != 0) {
    pointer_ = 0;
    return failed(driver_, operation, result, "reserving addresses for multicast (cuMemAddressReserve)");
  }
  result = driver_.map(pointer_, span_, 0, handle_, 0);
  if (result != 0) return failed(driver_, operation, result, "mapping the multicast object (cuMemMap)");
  mapped_ = true;
  const AccessDescription access{{kOnDevice, gpu_.device}, kReadWrite};
  result = driver_.set_access(pointer_, span_, &access, 1);
  if (result != 0) return failed(driver_, operation, result, "getting access to the multicast object (cuMemSetAccess)");
  return PHX_OK;
}

}  // namespace phx::cuda
