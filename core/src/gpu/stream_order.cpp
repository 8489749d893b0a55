#include "gpu/stream_order.h"

#include <cstdint>

#include "base/error.h"

namespace phx::cuda {

bool reaches(const Driver &driver, const Gpu &gpu, const void *pointer) {
  const Current current(driver, gpu.context);
  int kind = 0;
  return driver.pointer_attribute(&kind, kKindOfMemory, reinterpret_cast<uintptr_t>(pointer)) == 0;
}

phx_status is_capturing(const char *operation, const Driver &driver, const Gpu &gpu, void *stream, bool *out) {
  const Current current(driver, gpu.context);
  int state = kNotCapturing;
  const Result result = driver.stream_capturing(static_cast<Stream>(stream), &state);
  if (result != 0) return failed(driver, operation, result, "asking about the stream (cuStreamIsCapturing)");
  *out = state != kNotCapturing;
  return PHX_OK;
}

phx_status copy_within(const char *operation, const Driver &driver, const Gpu &gpu, void *to, const void *from,
                       size_t bytes, void *stream) {
  if (bytes == 0 || to == from) return PHX_OK;
  const Current current(driver, gpu.context);
  Result result = current.result();
  if (result == 0)
    result = driver.copy_within(reinterpret_cast<uintptr_t>(to), reinterpret_cast<uintptr_t>(from), bytes,
                                static_cast<Stream>(stream));
  return result == 0 ? PHX_OK : failed(driver, operation, result, "copying memory of the GPU (cuMemcpyDtoDAsync)");
}

StreamOrder::~StreamOrder() {
  if (last_ == nullptr) return;
  const Current current(*driver_, context_);
  driver_->event_wait(last_);  // returns at once if the event was never recorded
  driver_->event_destroy(last_);
}

phx_status StreamOrder::open(const char *operation, const Driver &driver, const Gpu &gpu) {
  if (last_ != nullptr) return PHX_OK;
  const Current current(driver, gpu.context);
  Result result = current.result();
  if (result == 0) result = driver.event_create(&last_, kUntimed);
  driver_ = &driver;
  context_ = gpu.context;
  if (result == 0) return PHX_OK;
  last_ = nullptr;
  return failed(driver, operation, result, "making an event (cuEventCreate)");
}

phx_status StreamOrder::begin(const char *operation, void *stream, bool capturing) const {
  if (capturing || !recorded_) return PHX_OK;
  const Current current(*driver_, context_);
  const Result result = driver_->stream_after(static_cast<Stream>(stream), last_, 0);
  return result == 0 ? PHX_OK : failed(*driver_, operation, result, "waiting for another stream (cuStreamWaitEvent)");
}

phx_status StreamOrder::end(const char *operation, void *stream, bool capturing) {
  if (capturing) return PHX_OK;
  const Current current(*driver_, context_);
  const Result result = driver_->event_record(last_, static_cast<Stream>(stream));
  recorded_ = recorded_ || result == 0;
  if (result == 0) return PHX_OK;
  driver_->stream_wait(static_cast<Stream>(stream));  // later work could not wait for it, so wait now
  return failed(*driver_, operation, result, "recording an event (cuEventRecord)");
}

void StreamOrder::wait() const {
  const Current current(*driver_, context_);
  driver_->event_wait(last_);
}

}  // namespace phx::cuda
