// A CUDA driver without a GPU, for tests: memfds are its memory, and as long as no kernel runs no processor of the host
// can read them where they are "mapped", so that a test fails if the core tries. Kernels run on threads of the host.
// Only what core/src/cuda/driver.h names, copies, and what tests/support/fake_torch_cuda calls beside it.
//
//   FAKE_CUDA_DEVICES=N      how many GPUs there are (2)
//   FAKE_CUDA_PROCESSORS=N   how many blocks run at once, on each of them (6)
//   FAKE_CUDA_MULTICAST=N    how many GPUs, from the first one on, switches connect (all)
//   FAKE_CUDA_LACKS=prefix   kernels that the image does not have
//   FAKE_CUDA_FAIL=cuMemMap  which function fails, with CUDA_ERROR_UNKNOWN
//   FAKE_CUDA_FAIL_AT=N      from which of its calls on: 1 for the first after the variable is set
//   FAKE_CUDA_KILL=1         it does not fail, but ends the process
//   FAKE_CUDA_FORKS=1        a process forked after it was started may use it
//
// As a real one it does not work in a process that was forked after it was started; streams go with the last reference
// to their context; and to load a kernel waits for all that runs in the context.
//
// Compiled with FAKE_CUDA_OLD it is a driver that does not know multicast.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "fake_cuda/kernels.h"
#include "fake_cuda/multicast.h"

using namespace phx::cuda;

namespace {

constexpr Result kOk = 0, kInvalidValue = 1, kNotInitialized = 3, kNoDevice = 100, kInvalidContext = 201,
                 kInvalidHandle = 400, kNotFound = 500, kNotReady = 600, kCaptureUnsupported = 900,
                 kCaptureIsolation = 905, kCapturedEvent = 907, kUnknown = 999;
constexpr size_t kUnit = size_t{64} << 10;   // larger than a page, as that of a GPU is
constexpr size_t kMemory = size_t{1} << 30;  // of each GPU

struct Physical {
  int fd;
  size_t size;
  int references;  // the handle's and the mappings'
  int device;      // -1: a peer's
  bool multicast;  // fd is a fake_cuda::Switch, size that of its memory
};
struct Mapped {
  Handle handle;
  size_t size;
  bool accessible;
  Device device;  // that has access
  void *host;     // where the host sees the same memory; NULL until fake_cuda_host is asked
};

struct Capture {
  int mode;
  std::thread::id by;
};

struct State {
  std::mutex mutex;
  pid_t started = 0;  // the process that did it
  Handle next = 1;
  size_t allocated = 0;
  std::map<Handle, Physical> physical;
  std::map<Pointer, size_t> reserved;
  std::map<Pointer, Mapped> mapped;
  std::map<void *, size_t> registered;
  std::map<std::pair<Handle, Device>, size_t> bound;
  std::map<Stream, Capture> captures;    // that go on
  std::map<const void *, int> launches;  // of each kernel
  std::map<const void *, int> blocks;    // of its last one
  std::map<Device, int> contexts;        // references
  std::map<Stream, Device> streams;
  std::map<Device, std::set<const void *>> loaded;  // kernels
  int events = 0, modules = 0;
  std::map<Device, int> running;  // kernels
  std::map<Device, int> ahead;    // kernels that are on streams, and have not ended
  std::condition_variable ended;  // a kernel
  std::map<Device, fake_cuda::Processors> processors;
};
State &state() {
  static State *const all = new State;
  return *all;
}
thread_local std::vector<Context> current_contexts;
thread_local int capture_mode = 0;  // CU_STREAM_CAPTURE_MODE_GLOBAL
Device current_device() {           // there must be a context
  return static_cast<Device>(reinterpret_cast<intptr_t>(current_contexts.back())) - 1;
}

bool can_be_used(const State &s) {
  return s.started == getpid() || (s.started != 0 && std::getenv("FAKE_CUDA_FORKS") != nullptr);
}
bool any_runs(const State &s) {
  return std::any_of(s.running.begin(), s.running.end(), [](const auto &one) { return one.second != 0; });
}

// Whether a capture forbids this thread what waits for the GPU, asks whether it is through, or takes long.
bool is_captured_out(const State &s) {
  return capture_mode != kRelaxed && std::any_of(s.captures.begin(), s.captures.end(), [](const auto &one) {
           const Capture &capture = one.second;
           if (capture.by == std::this_thread::get_id()) return capture.mode != kRelaxed;
           return capture_mode == 0 && capture.mode == 0;
         });
}

// With the state's mutex held.
bool fails(const char *function) {
  static int calls = 0;
  const char *which = std::getenv("FAKE_CUDA_FAIL");
  if (which == nullptr) calls = 0;  // they are counted anew
  if (which == nullptr || std::strcmp(which, function) != 0) return false;
  const bool now = ++calls >= fake_cuda::number("FAKE_CUDA_FAIL_AT", 1);
  if (now && std::getenv("FAKE_CUDA_KILL") != nullptr) raise(SIGKILL);
  return now;
}
int devices() {
  const char *given = std::getenv("FAKE_CUDA_DEVICES");
  return given != nullptr ? std::atoi(given) : 2;
}

void drop(State &s, Handle handle) {
  const auto found = s.physical.find(handle);
  if (--found->second.references != 0) return;
  if (!found->second.multicast) s.allocated -= found->second.size;
  close(found->second.fd);
  s.physical.erase(found);
}

// The memory behind `size` bytes at `pointer`, from *offset on. NULL: none that may be used.
const Physical *behind(State &s, Pointer pointer, size_t size, size_t *offset) {
  auto next = s.mapped.upper_bound(pointer);
  if (next == s.mapped.begin()) return nullptr;
  const auto &[begin, mapping] = *std::prev(next);
  const Physical &memory = s.physical.at(mapping.handle);
  if (!mapping.accessible || memory.multicast || pointer - begin + size > mapping.size) return nullptr;
  *offset = pointer - begin;
  return &memory;
}

// Whether a kernel that stores to `multicast` would reach the blocks of all ranks, and nothing else.
bool reaches_all(State &s, const phx_team &team) {
  const auto found = s.mapped.find(reinterpret_cast<uintptr_t>(team.multicast));
  if (found == s.mapped.end() || !found->second.accessible) return false;
  const Physical &object = s.physical.at(found->second.handle);
  size_t offset = 0;
  const size_t size = static_cast<size_t>(team.group_size) * sizeof(void *);
  const Physical *const list = behind(s, reinterpret_cast<uintptr_t>(team.buffers), size, &offset);
  if (!object.multicast || list == nullptr) return false;
  std::vector<Pointer> buffers(static_cast<size_t>(team.group_size));
  if (pread(list->fd, buffers.data(), size, static_cast<off_t>(offset)) != static_cast<ssize_t>(size)) return false;
  std::set<ino_t> blocks;
  for (const Pointer buffer : buffers) {
    const Physical *const memory = behind(s, buffer, team.bytes, &offset);
    if (memory == nullptr || offset != 0) return false;
    blocks.insert(fake_cuda::number_of(memory->fd));
  }
  return fake_cuda::Switch::of(object.fd)->bound() == blocks && team.bytes <= object.size;
}

void protect(Pointer pointer, const Mapped &mapping, bool readable) {
  mprotect(reinterpret_cast<void *>(static_cast<uintptr_t>(pointer)), mapping.size,
           readable && mapping.accessible ? PROT_READ | PROT_WRITE : PROT_NONE);
}
// A kernel has been put on a stream, or has ended.
void count_ahead(Device device, int change) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.ahead[device] += change;
  s.ended.notify_all();
}
// Kernels can read what the host cannot.
void count_running(Device device, int change) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.running[device] += change;
  s.ended.notify_all();
  for (const auto &[pointer, mapping] : s.mapped)
    if (!s.physical.at(mapping.handle).multicast) protect(pointer, mapping, any_runs(s));
}

// The default stream of the current context, which is there from the beginning.
fake_cuda::FakeStream &stream_of(Stream stream) {
  if (stream != nullptr) return *reinterpret_cast<fake_cuda::FakeStream *>(stream);
  static std::mutex mutex;
  static std::map<Context, fake_cuda::FakeStream *> of_context;
  const std::lock_guard<std::mutex> lock(mutex);
  fake_cuda::FakeStream *&own = of_context[current_contexts.empty() ? nullptr : current_contexts.back()];
  if (own == nullptr || !own->is_of_this_process()) own = new fake_cuda::FakeStream;
  return *own;
}
// Streams are gone with their context.
bool is_gone(const State &s, Stream stream) { return stream != nullptr && s.streams.count(stream) == 0; }
bool lacks(const char *kernel) {
  const char *const prefix = std::getenv("FAKE_CUDA_LACKS");
  return prefix != nullptr && std::strncmp(kernel, prefix, std::strlen(prefix)) == 0;
}
// In the current context.
void load(const void *kernel) {
  State &s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  const Device device = current_device();
  if (s.loaded[device].count(kernel) != 0) return;
  s.ended.wait(lock, [&] { return s.running[device] == 0 && s.ahead[device] == 0; });
  s.loaded[device].insert(kernel);
}
fake_cuda::FakeEvent &event_of(Event event) { return *reinterpret_cast<fake_cuda::FakeEvent *>(event); }

}  // namespace

#define FAKE(function, parameters) extern "C" __attribute__((visibility("default"))) Result function parameters
#define MAY_FAIL(function)                         \
  State &s = state();                              \
  const std::lock_guard<std::mutex> lock(s.mutex); \
  if (fails(#function)) return kUnknown;           \
  if (!can_be_used(s)) return kNotInitialized

FAKE(cuInit, (unsigned flags)) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (flags != 0) return kInvalidValue;
  if (devices() == 0) return kNoDevice;
  if (s.started == 0) s.started = getpid();
  return can_be_used(s) ? kOk : kNotInitialized;
}
FAKE(cuGetErrorName, (Result result, const char **name)) {
  switch (result) {
    case kInvalidValue: *name = "CUDA_ERROR_INVALID_VALUE"; return kOk;
    case kOutOfMemory: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return kOk;
    case kNoDevice: *name = "CUDA_ERROR_NO_DEVICE"; return kOk;
    case kUnknown: *name = "CUDA_ERROR_UNKNOWN"; return kOk;
    default: *name = nullptr; return kInvalidValue;
  }
}
FAKE(cuDeviceGetCount, (int *count)) {
  MAY_FAIL(cuDeviceGetCount);
  *count = devices();
  return kOk;
}
FAKE(cuDeviceGet, (Device * device, int index)) {
  MAY_FAIL(cuDeviceGet);
  *device = index;
  return index >= 0 && index < devices() ? kOk : kInvalidValue;
}
FAKE(cuDeviceGetAttribute, (int *value, int attribute, Device device)) {
  MAY_FAIL(cuDeviceGetAttribute);
  switch (attribute) {
    case kProcessors: *value = fake_cuda::number("FAKE_CUDA_PROCESSORS", 6); break;
    case kMostThreads: *value = 4; break;
    case kHasMulticast: *value = device < fake_cuda::number("FAKE_CUDA_MULTICAST", devices()) ? 1 : 0; break;
    default: *value = attribute == kHasVirtualMemory || attribute == kHasFileDescriptors ? 1 : 0;
  }
  return kOk;
}
FAKE(cuDeviceGetUuid_v2, (Uuid * uuid, Device device)) {
  MAY_FAIL(cuDeviceGetUuid_v2);
  *uuid = {};
  std::snprintf(uuid->bytes, sizeof uuid->bytes, "fake GPU %d", device);
  return kOk;
}
FAKE(cuDeviceGetName, (char *name, int size, Device)) {
  MAY_FAIL(cuDeviceGetName);
  std::snprintf(name, static_cast<size_t>(size), "GPU of a test");
  return kOk;
}
// For `phalanx doctor` alone, and `phalanx tune`, which asks as it does.
FAKE(cuDriverGetVersion, (int *version)) {
  *version = 12080;
  return kOk;
}
FAKE(cuDeviceTotalMem_v2, (size_t * bytes, Device)) {
  MAY_FAIL(cuDeviceTotalMem_v2);
  *bytes = kMemory;
  return kOk;
}
FAKE(cuDeviceCanAccessPeer, (int *able, Device device, Device peer)) {
  MAY_FAIL(cuDeviceCanAccessPeer);
  *able = device != peer ? 1 : 0;
  return kOk;
}
FAKE(cuDevicePrimaryCtxRetain, (Context * context, Device device)) {
  MAY_FAIL(cuDevicePrimaryCtxRetain);
  ++s.contexts[device];
  *context = reinterpret_cast<Context>(static_cast<intptr_t>(device) + 1);
  return kOk;
}
FAKE(cuDevicePrimaryCtxRelease_v2, (Device device)) {
  MAY_FAIL(cuDevicePrimaryCtxRelease_v2);
  if (s.contexts[device] == 0) return kInvalidContext;
  if (--s.contexts[device] != 0) return kOk;
  s.loaded.erase(device);
  for (auto stream = s.streams.begin(); stream != s.streams.end();)
    stream = stream->second == device ? s.streams.erase(stream) : std::next(stream);
  return kOk;
}
FAKE(cuCtxPushCurrent_v2, (Context context)) {
  MAY_FAIL(cuCtxPushCurrent_v2);
  if (context == nullptr) return kInvalidContext;
  current_contexts.push_back(context);
  return kOk;
}
FAKE(cuCtxPopCurrent_v2, (Context * context)) {
  MAY_FAIL(cuCtxPopCurrent_v2);
  if (current_contexts.empty()) return kInvalidContext;
  *context = current_contexts.back();
  current_contexts.pop_back();
  return kOk;
}
FAKE(cuMemGetAllocationGranularity, (size_t * bytes, const AllocationProperties *, int)) {
  MAY_FAIL(cuMemGetAllocationGranularity);
  *bytes = kUnit;
  return kOk;
}
FAKE(cuMemCreate, (Handle * handle, size_t size, const AllocationProperties *what, unsigned long long)) {
  MAY_FAIL(cuMemCreate);
  if (size == 0 || size % kUnit != 0 || what->type != kPinned || what->handle_types != kFileDescriptor ||
      what->location.type != kOnDevice || what->location.id >= devices())
    return kInvalidValue;
  if (size > kMemory || s.allocated > kMemory - size) return kOutOfMemory;
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) return kUnknown;
  // Memory of a GPU is not zeroed.
  const char rubbish = 77;
  for (size_t at = 0; at < size; at += kUnit) (void)!pwrite(fd, &rubbish, 1, static_cast<off_t>(at));
  *handle = s.next++;
  s.physical[*handle] = {fd, size, 1, what->location.id, false};
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
  // Of one that is not complete a driver would wait for the others.
  if (memory->second.multicast &&
      (!fake_cuda::Switch::of(memory->second.fd)->complete() || (pointer | size) % fake_cuda::kMulticastUnit != 0))
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
  if (memory == s.physical.end() || type != kFileDescriptor) return kInvalidValue;
  const int copy = dup(memory->second.fd);
  if (copy < 0) return kUnknown;
  *static_cast<int *>(out) = copy;
  return kOk;
}
FAKE(cuMemImportFromShareableHandle, (Handle * handle, void *given, int type)) {
  MAY_FAIL(cuMemImportFromShareableHandle);
  const int fd = static_cast<int>(reinterpret_cast<intptr_t>(given));
  struct stat about {};
  char name[64] = {}, link[64];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (type != kFileDescriptor || fstat(fd, &about) != 0 || readlink(link, name, sizeof name - 1) < 0 ||
      std::strstr(name, "fake-") == nullptr)
    return kInvalidValue;
  const int copy = dup(fd);
  if (copy < 0) return kUnknown;
  *handle = s.next++;
  if (std::strstr(name, fake_cuda::kSwitchName) != nullptr) {
    s.physical[*handle] = {copy, fake_cuda::Switch::of(copy)->size, 1, -1, true};
    return kOk;
  }
  s.physical[*handle] = {copy, static_cast<size_t>(about.st_size), 1, -1, false};
  s.allocated += static_cast<size_t>(about.st_size);
  return kOk;
}
#ifndef FAKE_CUDA_OLD
FAKE(cuMulticastGetGranularity, (size_t * bytes, const MulticastProperties *what, int option)) {
  MAY_FAIL(cuMulticastGetGranularity);
  if (what->handle_types != kFileDescriptor || option != kSmallestGranularity) return kInvalidValue;
  *bytes = fake_cuda::kMulticastUnit;
  return kOk;
}
FAKE(cuMulticastCreate, (Handle * handle, const MulticastProperties *what)) {
  MAY_FAIL(cuMulticastCreate);
  if (what->devices < 2 || what->size == 0 || what->size % fake_cuda::kMulticastUnit != 0 ||
      what->handle_types != kFileDescriptor || what->flags != 0)
    return kInvalidValue;
  const int fd = fake_cuda::make_switch(what->devices, what->size);
  if (fd < 0) return kUnknown;
  *handle = s.next++;
  s.physical[*handle] = {fd, what->size, 1, -1, true};
  return kOk;
}
FAKE(cuMulticastAddDevice, (Handle handle, Device device)) {
  MAY_FAIL(cuMulticastAddDevice);
  const auto object = s.physical.find(handle);
  if (object == s.physical.end() || !object->second.multicast || device < 0 || device >= devices())
    return kInvalidValue;
  return fake_cuda::Switch::of(object->second.fd)->add(device) ? kOk : kInvalidValue;
}
FAKE(cuMulticastBindMem,
     (Handle handle, size_t offset, Handle memory, size_t memory_offset, size_t size, unsigned long long flags)) {
  MAY_FAIL(cuMulticastBindMem);
  const auto object = s.physical.find(handle), part = s.physical.find(memory);
  if (object == s.physical.end() || !object->second.multicast || part == s.physical.end() || part->second.multicast ||
      offset != 0 || memory_offset != 0 || flags != 0 || size == 0 || size % fake_cuda::kMulticastUnit != 0 ||
      size > object->second.size || size > part->second.size)
    return kInvalidValue;
  const int device = part->second.device;
  const auto made = fake_cuda::Switch::of(object->second.fd);
  // Of one that is not complete a driver would wait for the others.
  if (device < 0 || !made->complete() || !made->bind(device, fake_cuda::number_of(part->second.fd)))
    return kInvalidValue;
  s.bound[{handle, device}] = size;
  return kOk;
}
FAKE(cuMulticastUnbind, (Handle handle, Device device, size_t offset, size_t size)) {
  MAY_FAIL(cuMulticastUnbind);
  const auto found = s.bound.find({handle, device});
  if (found == s.bound.end() || offset != 0 || size != found->second) return kInvalidValue;
  fake_cuda::Switch::of(s.physical.at(handle).fd)->unbind(device);
  s.bound.erase(found);
  return kOk;
}
#endif
FAKE(cuStreamCreate, (Stream * stream, unsigned)) {
  MAY_FAIL(cuStreamCreate);
  if (current_contexts.empty()) return kInvalidContext;
  *stream = reinterpret_cast<Stream>(new fake_cuda::FakeStream);
  s.streams[*stream] = current_device();
  return kOk;
}
FAKE(cuStreamDestroy_v2, (Stream stream)) {
  {
    MAY_FAIL(cuStreamDestroy_v2);
    if (stream == nullptr || s.streams.erase(stream) == 0) return kInvalidHandle;
  }
  delete &stream_of(stream);
  return kOk;
}
FAKE(cuStreamSynchronize, (Stream stream)) {
  {
    MAY_FAIL(cuStreamSynchronize);
    if (is_captured_out(s)) return kCaptureUnsupported;
    if (is_gone(s, stream)) return kInvalidHandle;
  }
  stream_of(stream).wait();
  return kOk;
}
FAKE(cuStreamQuery, (Stream stream)) {
  MAY_FAIL(cuStreamQuery);
  if (is_captured_out(s)) return kCaptureUnsupported;
  if (is_gone(s, stream)) return kInvalidHandle;
  return stream_of(stream).idle() ? kOk : kNotReady;
}
FAKE(cuStreamWaitEvent, (Stream stream, Event event, unsigned flags)) {
  MAY_FAIL(cuStreamWaitEvent);
  if (current_contexts.empty()) return kInvalidContext;
  if (flags != 0) return kInvalidValue;
  if (is_gone(s, stream)) return kInvalidHandle;
  return event_of(event).order(stream_of(stream)) ? kOk : kCaptureIsolation;
}
FAKE(cuLaunchHostFunc, (Stream stream, void (*function)(void *), void *data)) {
  MAY_FAIL(cuLaunchHostFunc);
  if (is_gone(s, stream)) return kInvalidHandle;
  stream_of(stream).put([=] { function(data); });
  return kOk;
}
FAKE(cuStreamBeginCapture_v2, (Stream stream, int mode)) {
  MAY_FAIL(cuStreamBeginCapture_v2);
  if (is_gone(s, stream)) return kInvalidHandle;
  if (stream == nullptr || stream_of(stream).capturing()) return kInvalidValue;
  stream_of(stream).capture(true);
  s.captures[stream] = {mode, std::this_thread::get_id()};
  return kOk;
}
// Graphs and what is made of them are the same thing.
FAKE(cuStreamEndCapture, (Stream stream, void **graph)) {
  MAY_FAIL(cuStreamEndCapture);
  if (s.captures.erase(stream) == 0) return kInvalidValue;
  *graph = new fake_cuda::GraphRef(stream_of(stream).capture(false));
  return kOk;
}
FAKE(cuGraphInstantiateWithFlags, (void **made, void *graph, unsigned long long)) {
  MAY_FAIL(cuGraphInstantiateWithFlags);
  *made = new fake_cuda::GraphRef(*static_cast<fake_cuda::GraphRef *>(graph));
  return kOk;
}
FAKE(cuGraphLaunch, (void *made, Stream stream)) {
  MAY_FAIL(cuGraphLaunch);
  if (is_gone(s, stream)) return kInvalidHandle;
  stream_of(stream).launch(**static_cast<fake_cuda::GraphRef *>(made));
  return kOk;
}
FAKE(cuGraphExecDestroy, (void *made)) {
  MAY_FAIL(cuGraphExecDestroy);
  delete static_cast<fake_cuda::GraphRef *>(made);
  return kOk;
}
FAKE(cuGraphDestroy, (void *graph)) {
  MAY_FAIL(cuGraphDestroy);
  delete static_cast<fake_cuda::GraphRef *>(graph);
  return kOk;
}
FAKE(cuStreamGetCaptureInfo_v2,
     (Stream stream, int *status, uint64_t *id, void **graph, const void **nodes, size_t *count)) {
  MAY_FAIL(cuStreamGetCaptureInfo_v2);
  if (graph != nullptr || nodes != nullptr || count != nullptr) return kInvalidValue;  // nobody asks
  const fake_cuda::GraphRef captured = stream_of(stream).captured_into();
  *status = captured != nullptr ? 1 : kNotCapturing;
  *id = captured != nullptr ? captured->id : 0;
  return kOk;
}
FAKE(cuThreadExchangeStreamCaptureMode, (int *mode)) {
  std::swap(capture_mode, *mode);
  return kOk;
}
FAKE(cuStreamIsCapturing, (Stream stream, int *status)) {
  MAY_FAIL(cuStreamIsCapturing);
  if (is_gone(s, stream)) return kInvalidHandle;
  *status = stream_of(stream).capturing() ? 1 : kNotCapturing;
  return kOk;
}
FAKE(cuEventCreate, (Event * event, unsigned)) {
  MAY_FAIL(cuEventCreate);
  if (current_contexts.empty()) return kInvalidContext;
  ++s.events;
  *event = reinterpret_cast<Event>(new fake_cuda::FakeEvent);
  return kOk;
}
FAKE(cuEventDestroy_v2, (Event event)) {
  MAY_FAIL(cuEventDestroy_v2);
  --s.events;
  delete &event_of(event);
  return kOk;
}
FAKE(cuEventRecord, (Event event, Stream stream)) {
  MAY_FAIL(cuEventRecord);
  if (is_gone(s, stream)) return kInvalidHandle;
  event_of(event).record(stream_of(stream));
  return kOk;
}
FAKE(cuEventSynchronize, (Event event)) {
  {
    MAY_FAIL(cuEventSynchronize);
    if (is_captured_out(s)) return kCaptureUnsupported;
  }
  return event_of(event).wait() ? kOk : kCapturedEvent;
}
FAKE(cuEventQuery, (Event event)) {
  MAY_FAIL(cuEventQuery);
  if (is_captured_out(s)) return kCaptureUnsupported;
  return event_of(event).done() ? kOk : kNotReady;
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
  if (current_contexts.empty()) return kInvalidContext;
  if (flags != kForAllContexts || s.registered.count(memory) != 0) return kInvalidValue;
  s.registered[memory] = bytes;
  return kOk;
}
FAKE(cuMemHostUnregister, (void *memory)) {
  MAY_FAIL(cuMemHostUnregister);
  return !current_contexts.empty() && s.registered.erase(memory) == 1 ? kOk : kInvalidValue;
}
FAKE(cuMemHostGetDevicePointer_v2, (Pointer * pointer, void *memory, unsigned)) {
  MAY_FAIL(cuMemHostGetDevicePointer_v2);
  if (s.registered.count(memory) == 0) return kInvalidValue;
  *pointer = reinterpret_cast<uintptr_t>(memory);
  return kOk;
}
// The image is not looked at: the kernels are in this library.
FAKE(cuModuleLoadData, (Module * module, const void *image)) {
  MAY_FAIL(cuModuleLoadData);
  if (is_captured_out(s)) return kCaptureUnsupported;
  if (current_contexts.empty()) return kInvalidContext;
  if (image == nullptr) return kInvalidValue;
  ++s.modules;
  *module = reinterpret_cast<Module>(static_cast<intptr_t>(1));
  return kOk;
}
FAKE(cuModuleUnload, (Module)) {
  MAY_FAIL(cuModuleUnload);
  --s.modules;
  return !current_contexts.empty() ? kOk : kInvalidContext;
}
FAKE(cuModuleGetFunction, (Function * function, Module, const char *name)) {
  const void *kernel = nullptr;
  {
    MAY_FAIL(cuModuleGetFunction);
    if (current_contexts.empty()) return kInvalidContext;
    kernel = lacks(name) ? nullptr : fake_cuda::find_kernel(name);
  }
  *function = reinterpret_cast<Function>(const_cast<void *>(kernel));
  if (kernel == nullptr) return kNotFound;
  load(kernel);
  return kOk;
}
#ifndef FAKE_CUDA_OLD
static std::vector<const char *> kernels() {  // of the image
  std::vector<const char *> names = fake_cuda::kernel_names();
  names.erase(std::remove_if(names.begin(), names.end(), lacks), names.end());
  return names;
}
FAKE(cuModuleGetFunctionCount, (unsigned *count, Module)) {
  MAY_FAIL(cuModuleGetFunctionCount);
  *count = static_cast<unsigned>(kernels().size());
  return kOk;
}
FAKE(cuModuleEnumerateFunctions, (Function * functions, unsigned count, Module)) {
  MAY_FAIL(cuModuleEnumerateFunctions);
  const std::vector<const char *> names = kernels();
  if (count > names.size()) return kInvalidValue;
  for (unsigned i = 0; i < count; ++i)
    functions[i] = reinterpret_cast<Function>(const_cast<void *>(fake_cuda::find_kernel(names[i])));
  return kOk;
}
FAKE(cuFuncGetName, (const char **name, Function function)) {
  MAY_FAIL(cuFuncGetName);
  *name = fake_cuda::name_of(function);
  return *name != nullptr ? kOk : kInvalidHandle;
}
FAKE(cuFuncLoad, (Function function)) {
  {
    MAY_FAIL(cuFuncLoad);
    if (current_contexts.empty()) return kInvalidContext;
  }
  load(function);
  return kOk;
}
#endif
FAKE(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *blocks, Function, int, size_t)) {
  MAY_FAIL(cuOccupancyMaxActiveBlocksPerMultiprocessor);
  *blocks = std::getenv("FAKE_CUDA_NO_ROOM") != nullptr ? 0 : 1;
  return kOk;
}
FAKE(cuLaunchKernel,
     (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
      unsigned block_z, unsigned shared, Stream stream, void **parameters, void **extra)) {
  MAY_FAIL(cuLaunchKernel);
  if (current_contexts.empty()) return kInvalidContext;
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > 4 || block_y != 1 || block_z != 1 ||
      shared != 0 || extra != nullptr)
    return kInvalidValue;
  if (is_gone(s, stream)) return kInvalidHandle;
  ++s.launches[function];
  s.blocks[function] = static_cast<int>(grid_x);
  const Device device = current_device();
  fake_cuda::Processors &processors = s.processors[device];
  if (fake_cuda::is_random(function)) {
    stream_of(stream).put([=, &processors, fill = *static_cast<const phx::random::DeviceFill *>(parameters[0])] {
      count_running(device, 1);
      fake_cuda::run(function, fill, grid_x, block_x, processors);
      count_running(device, -1);
    });
    return kOk;
  }
  if (fake_cuda::is_of_messages(function)) {
    stream_of(stream).put([=, &processors, exchange = *static_cast<const Exchange *>(parameters[0])] {
      count_running(device, 1);
      fake_cuda::run(function, exchange, grid_x, block_x, processors);
      count_running(device, -1);
    });
    return kOk;
  }
  const Launch launch = *static_cast<const Launch *>(parameters[0]);
  for (const phx_team *team : {&launch.team, &launch.spread.team})
    if (team->multicast != nullptr && !reaches_all(s, *team)) return kInvalidValue;
  const bool takes_lists = parameters[1] != nullptr;
  const phx::cuda::Lists lists =
      takes_lists ? *static_cast<const phx::cuda::Lists *>(parameters[1]) : phx::cuda::Lists{};
  const int ahead = stream_of(stream).capturing() ? 0 : 1;
  s.ahead[device] += ahead;
  stream_of(stream).put([=, &processors] {
    count_running(device, 1);
    fake_cuda::run(function, launch, takes_lists ? &lists : nullptr, grid_x, block_x, processors);
    count_running(device, -1);
    count_ahead(device, -ahead);
  });
  return kOk;
}
FAKE(cuMemsetD8Async, (Pointer pointer, unsigned char value, size_t count, Stream)) {
  MAY_FAIL(cuMemsetD8Async);
  size_t offset = 0;
  const Physical *memory = behind(s, pointer, count, &offset);
  if (memory == nullptr || current_contexts.empty()) return kInvalidValue;
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
  if (memory == nullptr || current_contexts.empty()) return kInvalidValue;
  return pwrite(memory->fd, from, count, static_cast<off_t>(offset)) == static_cast<ssize_t>(count) ? kOk : kUnknown;
}
FAKE(cuMemcpyDtoDAsync_v2, (Pointer to, Pointer from, size_t count, Stream stream)) {
  MAY_FAIL(cuMemcpyDtoDAsync_v2);
  size_t offset = 0;
  if (behind(s, to, count, &offset) == nullptr || behind(s, from, count, &offset) == nullptr ||
      current_contexts.empty())
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
  if (memory == nullptr || current_contexts.empty()) return kInvalidValue;
  return pwrite(memory->fd, from, count, static_cast<off_t>(offset)) == static_cast<ssize_t>(count) ? kOk : kUnknown;
}
FAKE(cuMemcpyDtoH_v2, (void *to, Pointer from, size_t count)) {
  MAY_FAIL(cuMemcpyDtoH_v2);
  if (is_captured_out(s)) return kCaptureUnsupported;
  size_t offset = 0;
  const Physical *memory = behind(s, from, count, &offset);
  if (memory == nullptr || current_contexts.empty()) return kInvalidValue;
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
// How often a kernel has been launched in this process.
FAKE(fake_cuda_launches, (const char *name)) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  return s.launches[fake_cuda::find_kernel(name)];
}
// Of how many blocks the last launch of a kernel was.
FAKE(fake_cuda_blocks, (const char *name)) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  return s.blocks[fake_cuda::find_kernel(name)];
}
// What a test asks: physical memory, reservations, mappings, contexts, streams and what else is alive.
FAKE(fake_cuda_alive, ()) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  int contexts = 0;
  for (const auto &[device, references] : s.contexts) contexts += references;
  return static_cast<int>(s.physical.size() + s.reserved.size() + s.mapped.size() + s.streams.size() + s.bound.size() +
                          s.registered.size()) +
         contexts + s.events + s.modules;
}
