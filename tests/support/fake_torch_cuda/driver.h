// The driver without a GPU (core/tests/fake_cuda), to which this library is linked, and what is kept of each of its
// GPUs.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include "gpu/driver.h"

namespace fake_torch {

namespace driver = phx::cuda;

extern "C" {
driver::Result cuInit(unsigned flags);
driver::Result cuDeviceGetCount(int *count);
driver::Result cuDevicePrimaryCtxRetain(driver::Context *context, driver::Device device);
driver::Result cuCtxPushCurrent_v2(driver::Context context);
driver::Result cuCtxPopCurrent_v2(driver::Context *context);
driver::Result cuMemCreate(driver::Handle *handle, size_t size, const driver::AllocationProperties *what,
                           unsigned long long flags);
driver::Result cuMemRelease(driver::Handle handle);
driver::Result cuMemAddressReserve(driver::Pointer *pointer, size_t size, size_t alignment, driver::Pointer wanted,
                                   unsigned long long flags);
driver::Result cuMemAddressFree(driver::Pointer pointer, size_t size);
driver::Result cuMemMap(driver::Pointer pointer, size_t size, size_t offset, driver::Handle handle,
                        unsigned long long flags);
driver::Result cuMemUnmap(driver::Pointer pointer, size_t size);
driver::Result cuMemSetAccess(driver::Pointer pointer, size_t size, const driver::AccessDescription *what,
                              size_t count);
driver::Result cuMemGetAllocationGranularity(size_t *bytes, const driver::AllocationProperties *what, int option);
driver::Result cuPointerGetAttribute(void *value, int attribute, driver::Pointer pointer);
driver::Result cuStreamCreate(driver::Stream *stream, unsigned flags);
driver::Result cuStreamSynchronize(driver::Stream stream);
driver::Result cuStreamQuery(driver::Stream stream);
driver::Result cuStreamWaitEvent(driver::Stream stream, driver::Event event, unsigned flags);
driver::Result cuStreamIsCapturing(driver::Stream stream, int *status);
driver::Result cuStreamBeginCapture_v2(driver::Stream stream, int mode);
driver::Result cuStreamEndCapture(driver::Stream stream, void **graph);
driver::Result cuGraphLaunch(void *graph, driver::Stream stream);
driver::Result cuGraphDestroy(void *graph);
driver::Result cuLaunchHostFunc(driver::Stream stream, void (*function)(void *), void *data);
driver::Result cuEventCreate(driver::Event *event, unsigned flags);
driver::Result cuEventDestroy_v2(driver::Event event);
driver::Result cuEventRecord(driver::Event event, driver::Stream stream);
driver::Result cuEventQuery(driver::Event event);
driver::Result cuEventSynchronize(driver::Event event);
driver::Result fake_cuda_host(driver::Pointer pointer, void **host);
}

#define FAKE_CHECK(call)                                                                  \
  do {                                                                                    \
    const ::phx::cuda::Result fake_result = call;                                         \
    TORCH_CHECK(fake_result == 0, "CUDA error: " #call " failed with ", fake_result, ""); \
  } while (false)

inline driver::Pointer pointer_of(const void *data) { return reinterpret_cast<uintptr_t>(data); }

int device_count();
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);

// Makes the primary context of a GPU the current one of the driver.
class InContext {
 public:
  explicit InContext(c10::DeviceIndex device);
  InContext(const InContext &) = delete;
  InContext &operator=(const InContext &) = delete;
  ~InContext();
};

// torch numbers streams; 0 is the default stream, whose handle is NULL, any other number is the handle itself.
inline driver::Stream handle_of(const c10::Stream &stream) { return reinterpret_cast<driver::Stream>(stream.id()); }
c10::Stream current_stream(c10::DeviceIndex device);
void set_current_stream(const c10::Stream &stream);
c10::Stream new_stream(c10::DeviceIndex device);
void wait_for(const c10::Stream &stream);
void wait_for_device(c10::DeviceIndex device);
bool is_capturing(const c10::Stream &stream);

}  // namespace fake_torch
