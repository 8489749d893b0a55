// The driver without a GPU: objects by which a switch stores to several GPUs. Drivers of old have none.
#include "fake_cuda/multicast.h"

#include "fake_cuda/state.h"

using namespace fake_cuda;
using namespace phx::cuda;

#ifndef FAKE_CUDA_OLD
FAKE(cuMulticastGetGranularity, (size_t * bytes, const MulticastProperties *what, int option)) {
  MAY_FAIL(cuMulticastGetGranularity);
  if (what->handle_types != kFileDescriptor || option != kSmallestGranularity) return kInvalidValue;
  *bytes = kMulticastUnit;
  return kOk;
}
FAKE(cuMulticastCreate, (Handle * handle, const MulticastProperties *what)) {
  MAY_FAIL(cuMulticastCreate);
  if (what->devices < 2 || what->size == 0 || what->size % kMulticastUnit != 0 ||
      what->handle_types != kFileDescriptor || what->flags != 0)
    return kInvalidValue;
  const int fd = make_switch(what->devices, what->size);
  if (fd < 0) return kUnknown;
  *handle = s.next++;
  s.physical[*handle] = {fd, what->size, 1, -1, true, false};
  return kOk;
}
FAKE(cuMulticastAddDevice, (Handle handle, Device device)) {
  MAY_FAIL(cuMulticastAddDevice);
  const auto object = s.physical.find(handle);
  if (object == s.physical.end() || !object->second.multicast || device < 0 || device >= devices())
    return kInvalidValue;
  return Switch::of(object->second.fd)->add(device) ? kOk : kInvalidValue;
}
FAKE(cuMulticastBindMem,
     (Handle handle, size_t offset, Handle memory, size_t memory_offset, size_t size, unsigned long long flags)) {
  MAY_FAIL(cuMulticastBindMem);
  const auto object = s.physical.find(handle), part = s.physical.find(memory);
  if (object == s.physical.end() || !object->second.multicast || part == s.physical.end() || part->second.multicast ||
      offset != 0 || memory_offset != 0 || flags != 0 || size == 0 || size % kMulticastUnit != 0 ||
      size > object->second.size || size > part->second.size)
    return kInvalidValue;
  const int device = part->second.device;
  const auto made = Switch::of(object->second.fd);
  // A driver would wait for the others where one is not complete.
  if (device < 0 || !made->complete() || !made->bind(device, number_of(part->second.fd))) return kInvalidValue;
  s.bound[{handle, device}] = size;
  return kOk;
}
FAKE(cuMulticastUnbind, (Handle handle, Device device, size_t offset, size_t size)) {
  MAY_FAIL(cuMulticastUnbind);
  const auto found = s.bound.find({handle, device});
  if (found == s.bound.end() || offset != 0 || size != found->second) return kInvalidValue;
  Switch::of(s.physical.at(handle).fd)->unbind(device);
  s.bound.erase(found);
  return kOk;
}
#endif
