// The GPUs, their streams and events, as torch asks for them.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Device.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <cstring>
#include <mutex>
#include <vector>

#include "driver.h"
#include "memory.h"

namespace fake_torch {
namespace {

constexpr int kMostDevices = 8;

struct State {
  State() {
    int number = 0;
    if (cuInit(0) != 0 || cuDeviceGetCount(&number) != 0) return;
    count = std::min(number, kMostDevices);
    for (int i = 0; i < count; ++i) FAKE_CHECK(cuDevicePrimaryCtxRetain(&contexts[i], i));
  }
  int count = 0;
  driver::Context contexts[kMostDevices] = {};
  std::mutex mutex;
  std::vector<c10::Stream> streams;  // that were made
};
State &state() {
  static State *const made = new State;
  return *made;
}

thread_local c10::DeviceIndex thread_device = 0;
thread_local c10::StreamId thread_streams[kMostDevices] = {};

c10::Device cuda(c10::DeviceIndex index) { return {c10::DeviceType::CUDA, index}; }
c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : thread_device; }

// Of a question that may be answered with "not yet", and may be refused while a stream is captured.
bool is_through(driver::Result result) {
  constexpr driver::Result kNotReady = 600;  // CUDA_ERROR_NOT_READY
  TORCH_CHECK(result == 0 || result == kNotReady, "CUDA error: a question failed with ", result);
  return result == 0;
}

driver::Event event_of(void *event) { return static_cast<driver::Event>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return cuda(thread_device); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) thread_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, cuda(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return new_stream(index_of(device)); }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(index_of(device)); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device_index());
    set_current_stream(stream);
    return before;
  }
  void *getStreamNativeHandle(const c10::Stream stream) const override { return handle_of(stream); }
  void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) cuEventDestroy_v2(event_of(event));
  }
  void record(void **event, const c10::Stream &stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    const InContext context(stream.device_index());
    driver::Event made = event_of(*event);
    if (made == nullptr) FAKE_CHECK(cuEventCreate(&made, driver::kUntimed));
    *event = made;
    FAKE_CHECK(cuEventRecord(made, handle_of(stream)));
  }
  void block(void *event, const c10::Stream &stream) const override {
    const InContext context(stream.device_index());
    if (event != nullptr) FAKE_CHECK(cuStreamWaitEvent(handle_of(stream), event_of(event), 0));
  }
  bool queryEvent(void *event) const override { return event == nullptr || is_through(cuEventQuery(event_of(event))); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  bool queryStream(const c10::Stream &stream) const override {
    const InContext context(stream.device_index());
    return is_through(cuStreamQuery(handle_of(stream)));
  }
  void synchronizeStream(const c10::Stream &stream) const override { wait_for(stream); }
  bool isStreamCapturing(const c10::Stream &stream) const override { return is_capturing(stream); }
  void synchronizeEvent(void *event) const override {
    if (event != nullptr) FAKE_CHECK(cuEventSynchronize(event_of(event)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { wait_for_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override {
    record_stream(data, stream);
  }
  double elapsedTime(void *, void *, const c10::DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace

InContext::InContext(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "CUDA error: invalid device ordinal ", int(device));
  FAKE_CHECK(cuCtxPushCurrent_v2(state().contexts[device]));
}
InContext::~InContext() {
  driver::Context popped = nullptr;
  cuCtxPopCurrent_v2(&popped);
}

int device_count() { return state().count; }
c10::DeviceIndex current_device() { return thread_device; }
void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "CUDA error: invalid device ordinal ", int(index));
  thread_device = index;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, cuda(device), thread_streams[device]);
}
void set_current_stream(const c10::Stream &stream) { thread_streams[stream.device_index()] = stream.id(); }

c10::Stream new_stream(c10::DeviceIndex device) {
  const InContext context(device);
  driver::Stream made = nullptr;
  FAKE_CHECK(cuStreamCreate(&made, driver::kNonBlocking));
  const c10::Stream stream(c10::Stream::UNSAFE, cuda(device), reinterpret_cast<intptr_t>(made));
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().streams.push_back(stream);
  return stream;
}

void wait_for(const c10::Stream &stream) {
  const InContext context(stream.device_index());
  FAKE_CHECK(cuStreamSynchronize(handle_of(stream)));
}
void wait_for_device(c10::DeviceIndex device) {
  std::vector<c10::Stream> all{c10::Stream(c10::Stream::DEFAULT, cuda(device))};
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    for (const c10::Stream &stream : state().streams)
      if (stream.device_index() == device) all.push_back(stream);
  }
  for (const c10::Stream &stream : all) wait_for(stream);
}

bool is_capturing(const c10::Stream &stream) {
  const InContext context(stream.device_index());
  int status = 0;
  FAKE_CHECK(cuStreamIsCapturing(handle_of(stream), &status));
  return status != driver::kNotCapturing;
}

}  // namespace fake_torch

namespace at {

// torch finds it by this name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return fake_torch::device_count() > 0; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(fake_torch::device_count()); }
  int getNumGPUs() const override { return fake_torch::device_count(); }
  DeviceIndex current_device() const override { return fake_torch::current_device(); }
  DeviceIndex getCurrentDevice() const override { return fake_torch::current_device(); }
  void setCurrentDevice(DeviceIndex index) const override { fake_torch::set_current_device(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const DeviceIndex before = fake_torch::current_device();
    if (index >= 0) fake_torch::set_current_device(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  Device getDeviceFromPtr(void *data) const override {
    constexpr int kDeviceOfMemory = 9;  // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    int device = 0;
    FAKE_CHECK(fake_torch::cuPointerGetAttribute(&device, kDeviceOfMemory, fake_torch::pointer_of(data)));
    return {DeviceType::CUDA, static_cast<DeviceIndex>(device)};
  }
  Allocator *getCUDADeviceAllocator() const override { return GetAllocator(DeviceType::CUDA); }
  void deviceSynchronize(DeviceIndex index) const override { fake_torch::wait_for_device(index); }
};
// Above those of a torch that was built for CUDA.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks);

namespace {

// DDP has no timer for these GPUs, where a torch that was built for CUDA has one that asks the runtime of CUDA.
const c10d::RegistererTimerRegistry no_timer(DeviceType::CUDA, c10::REGISTRY_PREFERRED, c10d::TimerRegistry(),
                                             [](c10::Device) { return std::unique_ptr<c10d::Timer>(); });

// Whoever asked torch for its hooks before this library was there has made torch keep those of its build, without CUDA
// or without a GPU. They have no members, as ours have none, so they become ours by their table of functions.
const bool replaced = [] {
  const CUDAHooksInterface &kept = detail::getCUDAHooks();
  if (kept.hasCUDA()) return false;
  static const CUDAHooks ours{CUDAHooksArgs()};
  static_assert(sizeof(CUDAHooks) == sizeof(void *) && sizeof(CUDAHooksInterface) == sizeof(void *));
  std::memcpy(const_cast<void *>(static_cast<const void *>(&kept)), static_cast<const void *>(&ours), sizeof(void *));
  return true;
}();

#if defined(TORCH_BUILT_FOR_CUDA)
int32_t current_stream_of(int32_t device, void **stream) {
  *stream = fake_torch::handle_of(fake_torch::current_stream(static_cast<DeviceIndex>(device)));
  return 0;
}

// A torch that was built for CUDA tells C libraries its current stream by a function that asks the runtime of CUDA,
// which has no GPU. The function begins with a jump to ours.
const bool redirected = [] {
  void *const torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void *const function = torch_cuda == nullptr ? nullptr : dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream");
  if (function == nullptr) return false;
  unsigned char jump[12] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0};  // mov rax, ADDRESS; jmp rax
  const auto target = reinterpret_cast<uintptr_t>(&current_stream_of);
  std::memcpy(jump + 2, &target, sizeof(target));
  const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t start = reinterpret_cast<uintptr_t>(function) / page_bytes * page_bytes;
  TORCH_CHECK(mprotect(reinterpret_cast<void *>(start), 2 * page_bytes, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
  std::memcpy(function, jump, sizeof(jump));
  TORCH_CHECK(mprotect(reinterpret_cast<void *>(start), 2 * page_bytes, PROT_READ | PROT_EXEC) == 0);
  return true;
}();
#endif

}  // namespace
}  // namespace at
