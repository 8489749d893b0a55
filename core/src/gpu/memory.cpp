#include "gpu/memory.h"

#include <fcntl.h>

#include <new>

#include "base/error.h"
#include "base/shared_memory.h"

namespace phx::cuda {

size_t span_of(size_t size, size_t unit) { return round_up(size == 0 ? 1 : size, unit); }

Memory::~Memory() {
  const Current current(driver_, gpu_.context);
  if (mapped_) driver_.unmap(pointer_, span_);
  if (pointer_ != 0) driver_.unreserve(pointer_, span_);
  if (created_) driver_.release(handle_);
}

phx_status Memory::begin(const char *operation, const Gpus &gpus, const Gpu &gpu, size_t span, MemoryPtr *out) {
  out->reset(new (std::nothrow) Memory(gpus.driver(), gpu, span));
  return *out ? PHX_OK : fail(PHX_ERR_NO_MEMORY, operation, "out of memory");
}

phx_status Memory::map(const char *operation) {
  const Current current(driver_, gpu_.context);
  Result result = driver_.reserve(&pointer_, span_, 0, 0, 0);
  if (result != 0) {
    pointer_ = 0;
    return failed(driver_, operation, result, "reserving addresses (cuMemAddressReserve)");
  }
  result = driver_.map(pointer_, span_, 0, handle_, 0);
  if (result != 0) return failed(driver_, operation, result, "mapping the memory (cuMemMap)");
  mapped_ = true;
  const AccessDescription access{{kOnDevice, gpu_.device}, kReadWrite};
  result = driver_.set_access(pointer_, span_, &access, 1);
  if (result != 0) return failed(driver_, operation, result, "getting access to the memory (cuMemSetAccess)");
  return PHX_OK;
}

template <class Fill>
phx_status Memory::fill(const char *operation, const char *action, Fill fill) const {
  const Current current(driver_, gpu_.context);
  Stream stream = nullptr;
  Result result = current.result();
  if (result == 0) result = driver_.stream_create(&stream, kNonBlocking);
  if (result == 0) result = fill(stream);
  if (result == 0) result = driver_.stream_wait(stream);
  if (stream != nullptr) driver_.stream_destroy(stream);
  return result == 0 ? PHX_OK : failed(driver_, operation, result, action);
}

phx_status Memory::make(const char *operation, Gpus &gpus, int32_t index, size_t size, MemoryPtr *out) {
  Gpu gpu;
  MemoryPtr memory;
  phx_status status = gpus.get(operation, index, &gpu);
  if (status == PHX_OK) status = begin(operation, gpus, gpu, span_of(size, gpu.unit), &memory);
  if (status != PHX_OK) return status;
  const Current current(memory->driver_, gpu.context);
  const AllocationProperties properties = properties_of(memory->gpu_);
  const Result result = memory->driver_.create(&memory->handle_, memory->span_, &properties, 0);
  if (result != 0) return failed(memory->driver_, operation, result, "allocating memory of the GPU (cuMemCreate)");
  memory->created_ = true;
  status = memory->map(operation);
  if (status == PHX_OK)
    status = memory->fill(operation, "filling the memory with zeros (cuMemsetD8Async)", [&](Stream stream) {
      return memory->driver_.fill_bytes(memory->pointer_, 0, memory->span_, stream);
    });
  if (status == PHX_OK) *out = std::move(memory);
  return status;
}

phx_status Memory::import(const char *operation, Gpus &gpus, int32_t index, int fd, size_t span, MemoryPtr *out) {
  if (fd < 0) return fail(PHX_ERR_ABI, operation, "memory of a GPU came without a file descriptor");
  void *const handle = reinterpret_cast<void *>(static_cast<intptr_t>(fd));
  return import_handle(operation, gpus, index, handle, kFileDescriptor, span, out);
}

phx_status Memory::import_fabric(const char *operation, Gpus &gpus, int32_t index, const FabricHandle &handle,
                                 size_t span, MemoryPtr *out) {
  FabricHandle copy = handle;  // the driver takes no const
  return import_handle(operation, gpus, index, &copy, kFabric, span, out);
}

phx_status Memory::import_handle(const char *operation, Gpus &gpus, int32_t index, void *handle, int kind, size_t span,
                                 MemoryPtr *out) {
  Gpu gpu;
  MemoryPtr memory;
  phx_status status = gpus.get(operation, index, &gpu);
  if (status == PHX_OK) status = begin(operation, gpus, gpu, span, &memory);
  if (status != PHX_OK) return status;
  const Current current(memory->driver_, gpu.context);
  const Result result = memory->driver_.import_handle(&memory->handle_, handle, kind);
  if (result != 0)
    return failed(memory->driver_, operation, result, "importing memory of a GPU (cuMemImportFromShareableHandle)");
  memory->created_ = true;
  status = memory->map(operation);
  if (status == PHX_OK) *out = std::move(memory);
  return status;
}

phx_status Memory::export_fd(const char *operation, int *fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!fd_.valid()) {
    int exported = -1;
    const Result result = driver_.export_handle(&exported, handle_, kFileDescriptor, 0);
    if (result != 0)
      return failed(driver_, operation, result, "sharing memory of the GPU (cuMemExportToShareableHandle)");
    fd_ = Fd(exported);
    fcntl(exported, F_SETFD, FD_CLOEXEC);
  }
  *fd = fd_.get();
  return PHX_OK;
}

phx_status Memory::export_fabric(const char *operation, FabricHandle *out) const {
  const Current current(driver_, gpu_.context);
  Result result = current.result();
  if (result == 0) result = driver_.export_handle(out, handle_, kFabric, 0);
  return result == 0 ? PHX_OK
                     : failed(driver_, operation, result, "sharing memory of the GPU (cuMemExportToShareableHandle)");
}

phx_status Memory::write(const char *operation, size_t offset, const void *from, size_t bytes) const {
  return fill(operation, "writing to memory of the GPU (cuMemcpyHtoDAsync)",
              [&](Stream stream) { return driver_.copy_in(pointer_ + offset, from, bytes, stream); });
}

}  // namespace phx::cuda
