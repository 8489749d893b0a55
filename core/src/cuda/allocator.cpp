// The CUDA allocator: one piece of physical memory per block, made by the driver's virtual memory API and passed to
// peers as a file descriptor, as a memfd is.
//
// A descriptor keeps the physical memory alive, and so does a mapping: a peer can go on using a block that its owner
// has freed, or whose owner has died.
#include "cuda/allocator.h"

#include <fcntl.h>

#include <map>
#include <memory>
#include <mutex>
#include <new>

#include "base/error.h"
#include "base/fd.h"
#include "cuda/driver.h"
#include "memory/shared_memory.h"

namespace phx::cuda {
namespace {

AllocationProperties properties_of(Device device) {
  AllocationProperties properties{};
  properties.type = kPinned;
  properties.handle_types = kFileDescriptor;
  properties.location = {kOnDevice, device};
  return properties;
}

// A GPU that this allocator has used. Its primary context stays until the allocator is gone: to make it anew takes
// long.
struct Gpu {
  Device device = 0;
  Context context = nullptr;
  size_t unit = 0;  // bytes that memory comes in
};

class Gpus {
 public:
  explicit Gpus(const Driver &driver) : driver_(driver) {}
  Gpus(const Gpus &) = delete;
  Gpus &operator=(const Gpus &) = delete;
  ~Gpus() {
    for (const auto &entry : gpus_) driver_.context_release(entry.second.device);
  }
  const Driver &driver() const { return driver_; }

  phx_status get(const char *operation, int32_t index, Gpu *out) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = gpus_.find(index);
    if (found == gpus_.end()) {
      Gpu gpu;
      const phx_status status = open(operation, index, &gpu);
      if (status != PHX_OK) return status;
      found = gpus_.emplace(index, gpu).first;
    }
    *out = found->second;
    return PHX_OK;
  }

 private:
  phx_status open(const char *operation, int32_t index, Gpu *gpu) const {
    int count = 0;
    Result result = driver_.device_count(&count);
    if (result != 0) return failed(driver_, operation, result, "counting the GPUs (cuDeviceGetCount)");
    if (index < 0 || index >= count)
      return fail(PHX_ERR_INVALID, operation, "%s: there is no CUDA device %d; this process sees %d", operation, index,
                  count);
    result = driver_.device_get(&gpu->device, index);
    if (result != 0) return failed(driver_, operation, result, "finding the GPU (cuDeviceGet)");
    for (const int needed : {kHasVirtualMemory, kHasFileDescriptors}) {
      int has = 0;
      if (driver_.device_attribute(&has, needed, gpu->device) != 0 || has == 0)
        return fail(PHX_ERR_UNSUPPORTED, operation, "%s: CUDA device %d cannot share its memory: no %s", operation,
                    index, needed == kHasVirtualMemory ? "virtual memory management" : "handles that are descriptors");
    }
    const AllocationProperties properties = properties_of(gpu->device);
    result = driver_.granularity(&gpu->unit, &properties, kSmallestGranularity);
    if (result != 0)
      return failed(driver_, operation, result, "asking what memory comes in (cuMemGetAllocationGranularity)");
    result = driver_.context_retain(&gpu->context, gpu->device);
    return result == 0 ? PHX_OK : failed(driver_, operation, result, "opening the GPU (cuDevicePrimaryCtxRetain)");
  }

  const Driver &driver_;
  std::mutex mutex_;
  std::map<int32_t, Gpu> gpus_;
};

// Physical memory that is mapped for one GPU. Undone in the reverse order, as far as it got.
struct Mapping {
  const Driver &driver;
  const Gpu gpu;
  const size_t span;
  Handle handle = 0;
  bool created = false;
  Pointer pointer = 0;  // 0: no addresses are reserved
  bool mapped = false;
  std::mutex mutex;
  Fd fd;  // of the handle, once a peer wants it

  Mapping(const Driver &of, const Gpu &on, size_t size)
      : driver(of), gpu(on), span(round_up(size == 0 ? 1 : size, on.unit)) {}
  Mapping(const Mapping &) = delete;
  Mapping &operator=(const Mapping &) = delete;
  // Errors are of no use here: a driver that is shutting down gives everything back by itself.
  ~Mapping() {
    if (mapped) driver.unmap(pointer, span);
    if (pointer != 0) driver.unreserve(pointer, span);
    if (created) driver.release(handle);
  }
};
using MappingPtr = std::unique_ptr<Mapping>;

Gpus &gpus_of(void *self) { return *static_cast<Gpus *>(self); }
Mapping &mapping_of(uint64_t cookie) { return *reinterpret_cast<Mapping *>(static_cast<uintptr_t>(cookie)); }

// Makes the physical memory accessible to this rank's device, at addresses of its own.
phx_status map(const char *operation, Mapping &mapping) {
  const Driver &driver = mapping.driver;
  Result result = driver.reserve(&mapping.pointer, mapping.span, 0, 0, 0);
  if (result != 0) {
    mapping.pointer = 0;
    return failed(driver, operation, result, "reserving addresses (cuMemAddressReserve)");
  }
  result = driver.map(mapping.pointer, mapping.span, 0, mapping.handle, 0);
  if (result != 0) return failed(driver, operation, result, "mapping the memory (cuMemMap)");
  mapping.mapped = true;
  const AccessDescription access{{kOnDevice, mapping.gpu.device}, kReadWrite};
  result = driver.set_access(mapping.pointer, mapping.span, &access, 1);
  if (result != 0) return failed(driver, operation, result, "getting access to the memory (cuMemSetAccess)");
  return PHX_OK;
}

// On a stream of its own, which waits for nobody's kernels.
phx_status clear(const char *operation, Mapping &mapping) {
  const Driver &driver = mapping.driver;
  const Current current(driver, mapping.gpu.context);
  Stream stream = nullptr;
  Result result = current.result();
  if (result == 0) result = driver.stream_create(&stream, kNonBlocking);
  if (result == 0) result = driver.fill_bytes(mapping.pointer, 0, mapping.span, stream);
  if (result == 0) result = driver.stream_wait(stream);
  if (stream != nullptr) driver.stream_destroy(stream);
  return result == 0 ? PHX_OK : failed(driver, operation, result, "filling the memory with zeros (cuMemsetD8Async)");
}

// Physical memory for `size` bytes, not there yet. `index`: of the GPU that is going to use it.
phx_status begin(const char *operation, Gpus &gpus, int32_t index, size_t size, MappingPtr *out) {
  Gpu gpu;
  const phx_status status = gpus.get(operation, index, &gpu);
  if (status != PHX_OK) return status;
  out->reset(new (std::nothrow) Mapping(gpus.driver(), gpu, size));
  return *out ? PHX_OK : fail(PHX_ERR_NO_MEMORY, operation, "%s: out of memory", operation);
}

void hand_over(MappingPtr mapping, void **pointer, uint64_t *cookie) {
  *pointer = reinterpret_cast<void *>(static_cast<uintptr_t>(mapping->pointer));
  *cookie = reinterpret_cast<uintptr_t>(mapping.release());
}

phx_status allocate(void *self, const phx_device *device, size_t size, void **pointer, uint64_t *cookie) {
  const char *operation = "mem_alloc";
  MappingPtr mapping;
  phx_status status = begin(operation, gpus_of(self), device->index, size, &mapping);
  if (status != PHX_OK) return status;
  const AllocationProperties properties = properties_of(mapping->gpu.device);
  const Result result = mapping->driver.create(&mapping->handle, mapping->span, &properties, 0);
  if (result != 0) return failed(mapping->driver, operation, result, "allocating memory of the GPU (cuMemCreate)");
  mapping->created = true;
  status = map(operation, *mapping);
  if (status == PHX_OK) status = clear(operation, *mapping);
  if (status == PHX_OK) hand_over(std::move(mapping), pointer, cookie);
  return status;
}

phx_status release(void *, void *, uint64_t cookie) {
  delete &mapping_of(cookie);
  return PHX_OK;
}

phx_status export_memory(void *, void *, uint64_t cookie, void *, size_t *handle_size, int32_t *fd) {
  const char *operation = "symm_rendezvous";
  Mapping &mapping = mapping_of(cookie);
  std::lock_guard<std::mutex> lock(mapping.mutex);
  if (!mapping.fd.valid()) {
    int made = -1;
    const Result result = mapping.driver.export_handle(&made, mapping.handle, kFileDescriptor, 0);
    if (result != 0)
      return failed(mapping.driver, operation, result, "sharing memory of the GPU (cuMemExportToShareableHandle)");
    mapping.fd = Fd(made);
    fcntl(made, F_SETFD, FD_CLOEXEC);
  }
  *handle_size = 0;
  *fd = mapping.fd.get();
  return PHX_OK;
}

// The driver refuses to map more than there is, so the size needs no other check.
phx_status import_memory(void *self, const phx_device *device, const void *, size_t, int32_t fd, size_t size,
                         void **pointer, uint64_t *cookie) {
  const char *operation = "symm_rendezvous";
  if (fd < 0) return fail(PHX_ERR_ABI, operation, "%s: memory of a GPU came without a file descriptor", operation);
  MappingPtr mapping;
  phx_status status = begin(operation, gpus_of(self), device->index, size, &mapping);
  if (status != PHX_OK) return status;
  void *const given = reinterpret_cast<void *>(static_cast<intptr_t>(fd));
  const Result result = mapping->driver.import_handle(&mapping->handle, given, kFileDescriptor);
  if (result != 0)
    return failed(mapping->driver, operation, result, "importing memory of a GPU (cuMemImportFromShareableHandle)");
  mapping->created = true;
  status = map(operation, *mapping);
  if (status == PHX_OK) hand_over(std::move(mapping), pointer, cookie);
  return status;
}

void destroy(void *self) { delete static_cast<Gpus *>(self); }

}  // namespace

AllocatorRef make_allocator(std::string *problem) {
  const Driver *driver = find_driver(problem);
  if (driver == nullptr) return nullptr;
  phx_allocator_ops ops{};
  ops.struct_size = sizeof ops;
  ops.flags = PHX_ALLOCATOR_DEVICE_MEMORY;
  ops.name = "cuda";
  ops.alloc = allocate;
  ops.free = release;
  ops.export_handle = export_memory;
  ops.import_handle = import_memory;
  ops.unmap = release;
  ops.destroy = destroy;
  return std::make_shared<Allocator>(ops, new Gpus(*driver));
}

}  // namespace phx::cuda
