// The driver without a GPU: devices, and their contexts.
#include <unistd.h>

#include <cstdio>
#include <iterator>

#include "fake_cuda/state.h"

using namespace fake_cuda;
using namespace phx::cuda;

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
    case kNotPermitted: *name = "CUDA_ERROR_NOT_PERMITTED"; return kOk;
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
    case kProcessors: *value = number("FAKE_CUDA_PROCESSORS", 6); break;
    case kMostThreads: *value = 4; break;
    case kHasMulticast: *value = device < number("FAKE_CUDA_MULTICAST", devices()) ? 1 : 0; break;
    case kHasFabric: *value = device < number("FAKE_CUDA_FABRIC", devices()) ? 1 : 0; break;
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
  current_contexts().push_back(context);
  return kOk;
}
FAKE(cuCtxPopCurrent_v2, (Context * context)) {
  MAY_FAIL(cuCtxPopCurrent_v2);
  if (current_contexts().empty()) return kInvalidContext;
  *context = current_contexts().back();
  current_contexts().pop_back();
  return kOk;
}
