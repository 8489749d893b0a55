// The driver without a GPU: memory, what shares it, and copies. A memfd is the memory of a GPU.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "fake_cuda/multicast.h"
#include "fake_cuda/state.h"

using namespace fake_cuda;
using namespace phx::cuda;

// What a fabric handle of this driver says; any process of this host can follow it, whatever its namespaces.
namespace {
struct HandleContent {
  pid_t process;
  int fd;
  ino_t inode;
};
static_assert(sizeof(HandleContent) <= sizeof(FabricHandle));

// -1: the memory is gone.
int open_place(const HandleContent &place) {
  char link[64];
  struct stat about {};
  std::snprintf(link, sizeof link, "/proc/%d/fd/%d", place.process, place.fd);
  const int fd = open(link, O_RDWR | O_CLOEXEC);
  if (fd >= 0 && (fstat(fd, &about) != 0 || about.st_ino != place.inode)) {
    close(fd);
    return -1;
  }
  return fd;
}
bool has_fabric(int device) { return device < number("FAKE_CUDA_FABRIC", devices()); }
}  // namespace

FAKE(cuMemGetAllocationGranularity, (size_t * bytes, const AllocationProperties *, int)) {
  MAY_FAIL(cuMemGetAllocationGranularity);
  *bytes = kUnit;
  return kOk;
}
FAKE(cuMemCreate, (Handle * handle, size_t size, const AllocationProperties *what, unsigned long long)) {
  MAY_FAIL(cuMemCreate);
  const bool fabric = what->handle_types == (kFileDescriptor | kFabric);
  if (size == 0 || size % kUnit != 0 || what->type != kPinned || (!fabric && what->handle_types != kFileDescriptor) ||
      what->location.type != kOnDevice || what->location.id >= devices() || (fabric && !has_fabric(what->location.id)))
    return kInvalidValue;
  if (fabric && number("FAKE_CUDA_IMEX", 1) == 0) return kNotPermitted;  // no channel
  if (size > kMemory || s.allocated > kMemory - size) return kOutOfMemory;
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) return kUnknown;
  // Memory of a GPU is not zeroed.
  const char rubbish = 77;
  for (size_t at = 0; at < size; at += kUnit) (void)!pwrite(fd, &rubbish, 1, static_cast<off_t>(at));
  *handle = s.next++;
  s.physical[*handle] = {fd, size, 1, what->location.id, false, fabric};
  s.allocated += size;
  return kOk;
}
FAKE(cuMemRelease, (Handle handle)) {
  MAY_FAIL(cuMemRelease);
  if (s.physical.count(handle) == 0) return kInvalidValue;
  for (const auto &[what, size] : s.bound)
    if (what.first == handle) return kInvalidValue;  // a test shall see it
  drop(s, handle);
  return kOk;
}
FAKE(cuMemAddressReserve, (Pointer * pointer, size_t size, size_t alignment, Pointer, unsigned long long)) {
  MAY_FAIL(cuMemAddressReserve);
  if (size == 0 || size % kUnit != 0) return kInvalidValue;
  if (alignment == 0) alignment = kUnit;
  void *const place = mmap(nullptr, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return kOutOfMemory;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(place), from = (begin + alignment - 1) / alignment * alignment;
  if (from != begin) munmap(place, from - begin);
  munmap(reinterpret_cast<void *>(from + size), begin + alignment - from);
  *pointer = from;
  s.reserved[*pointer] = size;
  return kOk;
}
FAKE(cuMemAddressFree, (Pointer pointer, size_t size)) {
  MAY_FAIL(cuMemAddressFree);
  const auto found = s.reserved.find(pointer);
  if (found == s.reserved.end() || found->second != size || s.mapped.count(pointer) != 0) return kInvalidValue;
  munmap(reinterpret_cast<void *>(static_cast<uintptr_t>(pointer)), size);
  s.reserved.erase(found);
  return kOk;
}
FAKE(cuMemMap, (Pointer pointer, size_t size, size_t offset, Handle handle, unsigned long long)) {
  MAY_FAIL(cuMemMap);
  const auto place = s.reserved.find(pointer);
  const auto memory = s.physical.find(handle);
  if (place == s.reserved.end() || size > place->second || memory == s.physical.end() || offset != 0 ||
      size > memory->second.size || s.mapped.count(pointer) != 0)
    return kInvalidValue;
  // A driver would wait for the others where one is not complete.
  if (memory->second.multicast &&
      (!Switch::of(memory->second.fd)->complete() || (pointer | size) % kMulticastUnit != 0))
    return kInvalidValue;
  if (mmap(reinterpret_cast<void *>(static_cast<uintptr_t>(pointer)), size, PROT_NONE, MAP_SHARED | MAP_FIXED,
           memory->second.fd, 0) == MAP_FAILED)
    return kUnknown;
  ++memory->second.references;
  s.mapped[pointer] = {handle, size, false, 0, nullptr};
  return kOk;
}
FAKE(cuMemUnmap, (Pointer pointer, size_t size)) {
  MAY_FAIL(cuMemUnmap);
  const auto found = s.mapped.find(pointer);
  if (found == s.mapped.end() || found->second.size != size) return kInvalidValue;
  (void)mmap(reinterpret_cast<void *>(static_cast<uintptr_t>(pointer)), size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (found->second.host != nullptr) munmap(found->second.host, size);
  drop(s, found->second.handle);
  s.mapped.erase(found);
  return kOk;
}
FAKE(cuMemSetAccess, (Pointer pointer, size_t size, const AccessDescription *what, size_t count)) {
  MAY_FAIL(cuMemSetAccess);
  const auto found = s.mapped.find(pointer);
  if (found == s.mapped.end() || found->second.size != size || count != 1 || what->flags != kReadWrite ||
      what->location.type != kOnDevice || what->location.id >= devices())
    return kInvalidValue;
  found->second.accessible = true;
  found->second.device = what->location.id;
  if (!s.physical.at(found->second.handle).multicast) protect(pointer, found->second, any_runs(s));
  return kOk;
}
FAKE(cuMemExportToShareableHandle, (void *out, Handle handle, int type, unsigned long long)) {
  MAY_FAIL(cuMemExportToShareableHandle);
  const auto memory = s.physical.find(handle);
  if (memory == s.physical.end() || (type == kFabric ? !memory->second.fabric : type != kFileDescriptor))
    return kInvalidValue;
  if (type == kFabric) {
    struct stat about {};
    if (fstat(memory->second.fd, &about) != 0) return kUnknown;
    const HandleContent place{getpid(), memory->second.fd, about.st_ino};
    std::memset(out, 0, sizeof(FabricHandle));
    std::memcpy(out, &place, sizeof place);
    return kOk;
  }
  const int copy = dup(memory->second.fd);
  if (copy < 0) return kUnknown;
  *static_cast<int *>(out) = copy;
  return kOk;
}
FAKE(cuMemImportFromShareableHandle, (Handle * handle, void *given, int type)) {
  MAY_FAIL(cuMemImportFromShareableHandle);
  struct stat about {};
  char name[64] = {}, link[64];
  int fd = -1;
  if (type == kFabric) {
    HandleContent place{};
    std::memcpy(&place, given, sizeof place);
    fd = open_place(place);
  } else if (type == kFileDescriptor) {
    fd = dup(static_cast<int>(reinterpret_cast<intptr_t>(given)));
  }
  if (fd < 0) return kInvalidValue;
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (fstat(fd, &about) != 0 || readlink(link, name, sizeof name - 1) < 0 || std::strstr(name, "fake-") == nullptr) {
    close(fd);
    return kInvalidValue;
  }
  *handle = s.next++;
  if (std::strstr(name, kSwitchName) != nullptr) {
    s.physical[*handle] = {fd, Switch::of(fd)->size, 1, -1, true, false};
    return kOk;
  }
  s.physical[*handle] = {fd, static_cast<size_t>(about.st_size), 1, -1, false, type == kFabric};
  s.allocated += static_cast<size_t>(about.st_size);
  return kOk;
}
FAKE(cuPointerGetAttribute, (void *value, int attribute, Pointer pointer)) {
  MAY_FAIL(cuPointerGetAttribute);
  size_t offset = 0;
  constexpr int kDeviceOfMemory = 9;  // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
  if ((attribute != kKindOfMemory && attribute != kDeviceOfMemory) || behind(s, pointer, 1, &offset) == nullptr)
    return kInvalidValue;
  constexpr int kOfDevice = 2;  // CU_MEMORYTYPE_DEVICE
  *static_cast<int *>(value) = attribute == kKindOfMemory ? kOfDevice : s.mapped.find(pointer - offset)->second.device;
  return kOk;
}
FAKE(cuMemHostRegister_v2, (void *memory, size_t bytes, unsigned flags)) {
  MAY_FAIL(cuMemHostRegister_v2);
  if (is_captured_out(s)) return kCaptureUnsupported;
  if (current_contexts().empty()) return kInvalidContext;
  if (flags != kForAllContexts || s.registered.count(memory) != 0) return kInvalidValue;
  s.registered[memory] = bytes;
  return kOk;
}
FAKE(cuMemHostUnregister, (void *memory)) {
  MAY_FAIL(cuMemHostUnregister);
  return !current_contexts().empty() && s.registered.erase(memory) == 1 ? kOk : kInvalidValue;
}
FAKE(cuMemHostGetDevicePointer_v2, (Pointer * pointer, void *memory, unsigned)) {
  MAY_FAIL(cuMemHostGetDevicePointer_v2);
  if (s.registered.count(memory) == 0) return kInvalidValue;
  *pointer = reinterpret_cast<uintptr_t>(memory);
  return kOk;
}
FAKE(cuMemsetD8Async, (Pointer pointer, unsigned char value, size_t count, Stream)) {
  MAY_FAIL(cuMemsetD8Async);
  size_t offset = 0;
  const Physical *memory = behind(s, pointer, count, &offset);
  if (memory == nullptr || current_contexts().empty()) return kInvalidValue;
  void *const bytes = mmap(nullptr, memory->size, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
  if (bytes == MAP_FAILED) return kUnknown;
  std::memset(static_cast<char *>(bytes) + offset, value, count);
  munmap(bytes, memory->size);
  return kOk;
}
FAKE(cuMemcpyHtoDAsync_v2, (Pointer to, const void *from, size_t count, Stream stream)) {
  stream_of(stream).wait();
  MAY_FAIL(cuMemcpyHtoDAsync_v2);
  size_t offset = 0;
  const Physical *memory = behind(s, to, count, &offset);
  if (memory == nullptr || current_contexts().empty()) return kInvalidValue;
  return pwrite(memory->fd, from, count, static_cast<off_t>(offset)) == static_cast<ssize_t>(count) ? kOk : kUnknown;
}
FAKE(cuMemcpyDtoDAsync_v2, (Pointer to, Pointer from, size_t count, Stream stream)) {
  MAY_FAIL(cuMemcpyDtoDAsync_v2);
  size_t offset = 0;
  if (behind(s, to, count, &offset) == nullptr || behind(s, from, count, &offset) == nullptr ||
      current_contexts().empty())
    return kInvalidValue;
  if (is_gone(s, stream)) return kInvalidHandle;
  stream_of(stream).put([=, device = current_device()] {
    count_running(device, 1);
    std::memmove(reinterpret_cast<void *>(static_cast<uintptr_t>(to)),
                 reinterpret_cast<const void *>(static_cast<uintptr_t>(from)), count);
    count_running(device, -1);
  });
  return kOk;
}
FAKE(cuMemcpyHtoD_v2, (Pointer to, const void *from, size_t count)) {
  MAY_FAIL(cuMemcpyHtoD_v2);
  if (is_captured_out(s)) return kCaptureUnsupported;
  size_t offset = 0;
  const Physical *memory = behind(s, to, count, &offset);
  if (memory == nullptr || current_contexts().empty()) return kInvalidValue;
  return pwrite(memory->fd, from, count, static_cast<off_t>(offset)) == static_cast<ssize_t>(count) ? kOk : kUnknown;
}
FAKE(cuMemcpyDtoH_v2, (void *to, Pointer from, size_t count)) {
  MAY_FAIL(cuMemcpyDtoH_v2);
  if (is_captured_out(s)) return kCaptureUnsupported;
  size_t offset = 0;
  const Physical *memory = behind(s, from, count, &offset);
  if (memory == nullptr || current_contexts().empty()) return kInvalidValue;
  return pread(memory->fd, to, count, static_cast<off_t>(offset)) == static_cast<ssize_t>(count) ? kOk : kUnknown;
}
// Where the host sees the memory behind a pointer: for tests/support/fake_torch_cuda, whose kernels are the host's. It
// goes with the mapping.
FAKE(fake_cuda_host, (Pointer pointer, void **host)) {
  MAY_FAIL(fake_cuda_host);
  size_t offset = 0;
  const Physical *memory = behind(s, pointer, 1, &offset);
  if (memory == nullptr) return kInvalidValue;
  Mapped &mapping = s.mapped.find(pointer - offset)->second;
  if (mapping.host == nullptr) {
    void *const bytes = mmap(nullptr, mapping.size, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
    if (bytes == MAP_FAILED) return kUnknown;
    mapping.host = bytes;
  }
  *host = static_cast<char *>(mapping.host) + offset;
  return kOk;
}
