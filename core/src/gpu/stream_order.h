// Orders what a rank puts on streams of one GPU: each piece of work runs after the one before it, on any stream.
#pragma once

#include "gpu/gpu.h"

namespace phx::cuda {

// Whether kernels of the GPU can reach the memory at `pointer`.
bool reaches(const Driver &driver, const Gpu &gpu, const void *pointer);
phx_status is_capturing(const char *operation, const Driver &driver, const Gpu &gpu, void *stream, bool *out);
// Copies on the stream, by a copy engine.
phx_status copy_within(const char *operation, const Driver &driver, const Gpu &gpu, void *to, const void *from,
                       size_t bytes, void *stream);

// Puts a kernel on the stream.
phx_status launch_kernel(const char *operation, const Driver &driver, const Gpu &gpu, Function function, int64_t blocks,
                         int32_t threads, void *stream, void **parameters);

class StreamOrder {
 public:
  StreamOrder() = default;
  StreamOrder(const StreamOrder &) = delete;
  StreamOrder &operator=(const StreamOrder &) = delete;
  ~StreamOrder();  // waits for what was put on a stream last

  phx_status open(const char *operation, const Driver &driver, const Gpu &gpu);  // does nothing if it is open
  // Makes later work on the stream wait for all work before the last `end`. Does nothing while the stream is captured:
  // a captured call cannot wait for work that was not captured, and the caller orders the replays.
  phx_status begin(const char *operation, void *stream, bool capturing) const;
  // Makes the next `begin` wait for what was put on the stream.
  phx_status end(const char *operation, void *stream, bool capturing);
  void wait() const;  // on the host

 private:
  const Driver *driver_ = nullptr;
  Context context_ = nullptr;
  Event last_ = nullptr;
  bool recorded_ = false;
};

}  // namespace phx::cuda
