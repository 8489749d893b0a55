// Graphs: capture and replay on the current stream, for patches.py. Each returns the driver's result. And how many GPUs
// there are.
#include "driver.h"
#include "memory.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace fake_torch {
namespace {

driver::Stream stream_of(int device) { return handle_of(current_stream(static_cast<c10::DeviceIndex>(device))); }

}  // namespace

EXPORTED int fake_torch_device_count() { return device_count(); }
EXPORTED int fake_torch_is_capturing(int device) {
  return is_capturing(current_stream(static_cast<c10::DeviceIndex>(device))) ? 1 : 0;
}
EXPORTED int fake_torch_begin_capture(int device, int mode) {
  next_capture();
  const InContext context(static_cast<c10::DeviceIndex>(device));
  return cuStreamBeginCapture_v2(stream_of(device), mode);
}
EXPORTED int fake_torch_end_capture(int device, void **graph) {
  const InContext context(static_cast<c10::DeviceIndex>(device));
  return cuStreamEndCapture(stream_of(device), graph);
}
EXPORTED int fake_torch_replay(int device, void *graph) {
  const InContext context(static_cast<c10::DeviceIndex>(device));
  return cuGraphLaunch(graph, stream_of(device));
}
EXPORTED int fake_torch_forget(void *graph) { return cuGraphDestroy(graph); }

}  // namespace fake_torch
