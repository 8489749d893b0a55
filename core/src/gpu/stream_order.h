// What a rank puts on streams of one GPU, one thing after another: whatever stream the next is put on, it comes after.
#pragma once

#include <cstddef>

#include "gpu/gpu.h"

namespace phx::cuda {

// Whether kernels of that GPU can reach the memory.
bool reaches(const Driver &driver, const Gpu &gpu, const void *pointer);
phx_status is_capturing(const char *operation, const Driver &driver, const Gpu &gpu, void *stream, bool *out);
// On the stream, by a copy engine.
phx_status copy_within(const char *operation, const Driver &driver, const Gpu &gpu, void *to, const void *from,
                       size_t bytes, void *stream);

class StreamOrder {
 public:
  StreamOrder() = default;
  StreamOrder(const StreamOrder &) = delete;
  StreamOrder &operator=(const StreamOrder &) = delete;
  ~StreamOrder();  // waits for what was put on a stream last

  phx_status open(const char *operation, const Driver &driver, const Gpu &gpu);  // does nothing where it is open
  // What follows on the stream comes after all that has ended here. A captured call cannot wait for what was not
  // captured; replays are ordered by whoever replays them.
  phx_status begin(const char *operation, void *stream, bool capturing) const;
  // What was put on the stream has to end before what begins next.
  phx_status end(const char *operation, void *stream, bool capturing);
  void wait() const;  // on the host

 private:
  const Driver *driver_ = nullptr;
  Context context_ = nullptr;
  Event last_ = nullptr;
  bool recorded_ = false;
};

}  // namespace phx::cuda
