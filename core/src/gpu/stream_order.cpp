#include "gpu/stream_order.h"

#include "base/error.h"

namespace phx::cuda {

bool reaches(const Driver &driver, const Gpu &gpu, const void *pointer) {
  const Current current(driver, gpu.context);
  int kind = 0;
  return driver.pointer_attribute(&kind, kKindOfMemory, reinterpret_cast<uintptr_t>(pointer)) == 0;
}

phx_status is_capturing(const char *operation, const Driver &driver, const Gpu &gpu, void *stream, bool *out) {
  int state = kNotCapturing;
  PHX_TRY(on_gpu(operation, driver, gpu.context, "asking about the stream (cuStreamIsCapturing)",
                 [&] { return driver.stream_capturing(static_cast<Stream>(stream), &state); }));
  *out = state != kNotCapturing;
  return PHX_OK;
}

phx_status copy_within(const char *operation, const Driver &driver, const Gpu &gpu, void *to, const void *from,
                       size_t bytes, void *stream) {
  if (bytes == 0 || to == from) return PHX_OK;
  return on_gpu(operation, driver, gpu.context, "copying memory of the GPU (cuMemcpyDtoDAsync)", [&] {
    return driver.copy_within(reinterpret_cast<uintptr_t>(to), reinterpret_cast<uintptr_t>(from), bytes,
                              static_cast<Stream>(stream));
  });
}

phx_status launch_kernel(const char *operation, const Driver &driver, const Gpu &gpu, Function function, int64_t blocks,
                         int32_t threads, void *stream, void **parameters) {
  return on_gpu(operation, driver, gpu.context, "launching a kernel (cuLaunchKernel)", [&] {
    return driver.launch(function, static_cast<unsigned>(blocks), 1, 1, static_cast<unsigned>(threads), 1, 1, 0,
                         static_cast<Stream>(stream), parameters, nullptr);
  });
}

StreamOrder::~StreamOrder() {
  if (last_ == nullptr) return;
  const Current current(*driver_, context_);
  driver_->event_wait(last_);  // returns at once if the event was never recorded
  driver_->event_destroy(last_);
}

phx_status StreamOrder::open(const char *operation, const Driver &driver, const Gpu &gpu) {
  if (last_ != nullptr) return PHX_OK;
  Event event = nullptr;
  PHX_TRY(on_gpu(operation, driver, gpu.context, "making an event (cuEventCreate)",
                 [&] { return driver.event_create(&event, kUntimed); }));
  driver_ = &driver;
  context_ = gpu.context;
  last_ = event;
  return PHX_OK;
}

phx_status StreamOrder::begin(const char *operation, void *stream, bool capturing) const {
  if (capturing || !recorded_) return PHX_OK;
  return on_gpu(operation, *driver_, context_, "waiting for another stream (cuStreamWaitEvent)",
                [&] { return driver_->stream_after(static_cast<Stream>(stream), last_, 0); });
}

phx_status StreamOrder::end(const char *operation, void *stream, bool capturing) {
  if (capturing) return PHX_OK;
  return on_gpu(operation, *driver_, context_, "recording an event (cuEventRecord)", [&] {
    const Result result = driver_->event_record(last_, static_cast<Stream>(stream));
    recorded_ = recorded_ || result == 0;
    if (result != 0) driver_->stream_wait(static_cast<Stream>(stream));  // later work could not wait for it
    return result;
  });
}

void StreamOrder::wait() const {
  const Current current(*driver_, context_);
  driver_->event_wait(last_);
}

}  // namespace phx::cuda
