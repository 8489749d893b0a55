#include "gpu/memory.h"

#include <fcntl.h>

#include <cstring>
#include <new>

#include "base/error.h"
#include "base/shared_memory.h"

namespace phx::cuda {

size_t span_of(size_t size, size_t unit) { return round_up(size == 0 ? 1 : size, unit); }

MappedHandle::~MappedHandle() {
  const Current current(driver_, gpu_.context);
  if (mapped_) driver_.unmap(pointer_, span_);
  if (pointer_ != 0) driver_.unreserve(pointer_, span_);
  if (bound_) driver_.multicast_unbind(handle_, gpu_.device, 0, span_);
  if (created_) driver_.release(handle_);
}

phx_status MappedHandle::import_shared(const char *operation, void *handle, int kind, const char *thing) {
  const std::string action = std::string("importing ") + thing + " (cuMemImportFromShareableHandle)";
  PHX_TRY(on_gpu(operation, driver_, gpu_.context, action.c_str(),
                 [&] { return driver_.import_handle(&handle_, handle, kind); }));
  created_ = true;
  return PHX_OK;
}

phx_status MappedHandle::export_shared(const char *operation, void *out, int kind, const char *thing) const {
  const std::string action = std::string("sharing ") + thing + " (cuMemExportToShareableHandle)";
  return on_gpu(operation, driver_, gpu_.context, action.c_str(),
                [&] { return driver_.export_handle(out, handle_, kind, 0); });
}

phx_status MappedHandle::map(const char *operation, size_t alignment, const char *reserving, const char *thing) {
  const Current current(driver_, gpu_.context);
  Result result = driver_.reserve(&pointer_, span_, alignment, 0, 0);
  if (result != 0) {
    pointer_ = 0;
    return failed(driver_, operation, result, reserving);
  }
  result = driver_.map(pointer_, span_, 0, handle_, 0);
  if (result != 0) return failed(driver_, operation, result, ("mapping " + std::string(thing) + " (cuMemMap)").c_str());
  mapped_ = true;
  const AccessDescription access{{kOnDevice, gpu_.device}, kReadWrite};
  result = driver_.set_access(pointer_, span_, &access, 1);
  if (result == 0) return PHX_OK;
  return failed(driver_, operation, result, ("getting access to " + std::string(thing) + " (cuMemSetAccess)").c_str());
}

phx_status Memory::begin(const char *operation, const Gpus &gpus, const Gpu &gpu, size_t span, MemoryPtr *out) {
  out->reset(new (std::nothrow) Memory(gpus.driver(), gpu, span));
  return *out ? PHX_OK : fail(PHX_ERR_NO_MEMORY, operation, "out of memory");
}

phx_status Memory::map(const char *operation) {
  return MappedHandle::map(operation, 0, "reserving addresses (cuMemAddressReserve)", "the memory");
}

template <class Fill>
phx_status Memory::fill(const char *operation, const char *action, Fill fill) const {
  return on_gpu(operation, driver_, gpu_.context, action, [&] {
    Stream stream = nullptr;
    Result result = driver_.stream_create(&stream, kNonBlocking);
    if (result == 0) result = fill(stream);
    if (result == 0) result = driver_.stream_wait(stream);
    if (stream != nullptr) driver_.stream_destroy(stream);
    return result;
  });
}

phx_status Memory::make(const char *operation, Gpus &gpus, int32_t index, size_t size, MemoryPtr *out) {
  Gpu gpu;
  MemoryPtr memory;
  PHX_TRY(gpus.get(operation, index, &gpu));
  PHX_TRY(begin(operation, gpus, gpu, span_of(size, gpu.unit), &memory));
  const AllocationProperties properties = properties_of(gpu);
  PHX_TRY(on_gpu(operation, memory->driver_, gpu.context, "allocating memory of the GPU (cuMemCreate)",
                 [&] { return memory->driver_.create(&memory->handle_, memory->span_, &properties, 0); }));
  memory->created_ = true;
  PHX_TRY(memory->map(operation));
  PHX_TRY(memory->fill(operation, "filling the memory with zeros (cuMemsetD8Async)", [&](Stream stream) {
    return memory->driver_.fill_bytes(memory->pointer_, 0, memory->span_, stream);
  }));
  *out = std::move(memory);
  return PHX_OK;
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
  PHX_TRY(gpus.get(operation, index, &gpu));
  PHX_TRY(begin(operation, gpus, gpu, span, &memory));
  PHX_TRY(memory->import_shared(operation, handle, kind, "memory of a GPU"));
  PHX_TRY(memory->map(operation));
  *out = std::move(memory);
  return PHX_OK;
}

phx_status Memory::export_fd(const char *operation, int *fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!fd_.valid()) {
    int exported = -1;
    PHX_TRY(export_shared(operation, &exported, kFileDescriptor, "memory of the GPU"));
    fd_ = Fd(exported);
    fcntl(exported, F_SETFD, FD_CLOEXEC);
  }
  *fd = fd_.get();
  return PHX_OK;
}

phx_status Memory::export_fabric(const char *operation, FabricHandle *out) const {
  return export_shared(operation, out, kFabric, "memory of the GPU");
}

phx_status Memory::write(const char *operation, size_t offset, const void *from, size_t bytes) const {
  return fill(operation, "writing to memory of the GPU (cuMemcpyHtoDAsync)",
              [&](Stream stream) { return driver_.copy_in(pointer_ + offset, from, bytes, stream); });
}

// ---- the allocator

namespace {

Gpus &gpus(void *self) { return *static_cast<Gpus *>(self); }
Memory *memory_of(uint64_t cookie) { return static_cast<Memory *>(pointer_of(cookie)); }

phx_status allocate(void *self, const phx_device *device, size_t size, void **pointer, uint64_t *cookie) {
  MemoryPtr memory;
  const phx_status status = Memory::make("mem_alloc", gpus(self), device->index, size, &memory);
  if (status == PHX_OK) hand_over(std::move(memory), pointer, cookie);
  return status;
}

phx_status release(void *, void *, uint64_t cookie) {
  delete memory_of(cookie);
  return PHX_OK;
}

// The handle has the size to map, because the GPUs of peers may have another granularity.
phx_status export_memory(void *, void *, uint64_t cookie, void *handle, size_t *handle_size, int32_t *fd) {
  const uint64_t span = memory_of(cookie)->span();
  std::memcpy(handle, &span, sizeof span);
  *handle_size = sizeof span;
  return memory_of(cookie)->export_fd("symm_rendezvous", fd);
}

phx_status import_memory(void *self, const phx_device *device, const void *handle, size_t handle_size, int32_t fd,
                         size_t size, void **pointer, uint64_t *cookie) {
  const char *const operation = "symm_rendezvous";
  uint64_t span = 0;
  if (handle_size == sizeof span) std::memcpy(&span, handle, sizeof span);
  if (span == 0 || span < size)
    return fail(PHX_ERR_ABI, operation, "memory of a GPU came with a handle that does not say how large it is");
  MemoryPtr memory;
  const phx_status status = Memory::import(operation, gpus(self), device->index, fd, span, &memory);
  if (status == PHX_OK) hand_over(std::move(memory), pointer, cookie);
  return status;
}

void destroy(void *self) { delete static_cast<Gpus *>(self); }

}  // namespace

Gpus *gpus_of(const Allocator &allocator) {
  return allocator.ops().alloc == allocate ? static_cast<Gpus *>(allocator.self()) : nullptr;
}

void hand_over(MemoryPtr memory, void **pointer, uint64_t *cookie) {
  *pointer = pointer_of(memory->pointer());
  *cookie = reinterpret_cast<uintptr_t>(memory.release());
}

const Memory &memory_of(const Block &block) { return *memory_of(block.cookie); }

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
