// Streams of tests of GPUs, and what is captured from them.
#pragma once

#include "gpu.h"

namespace gpu {

// A stream of a rank's own.
class OwnStream {
 public:
  OwnStream() {
    Gpu gpu;
    CHECK(gpu.driver().stream_create(&stream_, phx::cuda::kNonBlocking) == 0);
  }
  ~OwnStream() {
    Gpu gpu;
    gpu.driver().stream_destroy(stream_);
  }
  OwnStream(const OwnStream &) = delete;
  OwnStream &operator=(const OwnStream &) = delete;
  void wait() const {
    Gpu gpu;
    CHECK(gpu.driver().stream_wait(stream_) == 0);
  }
  phx::cuda::Stream get() const { return stream_; }

 private:
  phx::cuda::Stream stream_ = nullptr;
};

// Only of the fake driver, whose streams are graphs as well: see fake_cuda/cuda.cpp.
inline void needs_capture() {
  if (symbol<int(phx::cuda::Stream, int)>("fake_cuda_capture") == nullptr)
    check::skip("the fake driver, which captures");
}
template <class Function>
void capture(const OwnStream &stream, const Function &function) {
  auto *const set = symbol<int(phx::cuda::Stream, int)>("fake_cuda_capture");
  set(stream.get(), 1);
  function();
  set(stream.get(), 0);
}
inline void replay(const OwnStream &stream) { symbol<int(phx::cuda::Stream)>("fake_cuda_replay")(stream.get()); }

}  // namespace gpu
