// Streams of tests of GPUs, and what is captured from them.
#pragma once

#include "gpu.h"

namespace gpu {

// A stream of a rank's own.
class OwnStream {
 public:
  OwnStream() {
    const Gpu gpu;
    CHECK(gpu.driver().stream_create(&stream_, phx::cuda::kNonBlocking) == 0);
  }
  ~OwnStream() {
    const Gpu gpu;
    gpu.driver().stream_destroy(stream_);
  }
  OwnStream(const OwnStream &) = delete;
  OwnStream &operator=(const OwnStream &) = delete;
  void wait() const {
    const Gpu gpu;
    CHECK(gpu.driver().stream_wait(stream_) == 0);
  }
  phx::cuda::Stream get() const { return stream_; }

 private:
  const Context context_;
  phx::cuda::Stream stream_ = nullptr;
};

// What a function puts on a stream, to be replayed there.
class Graph {
 public:
  template <class Function>
  Graph(const OwnStream &stream, const Function &function) : stream_(stream) {
    const Gpu gpu;
    auto *const begin = symbol<int(phx::cuda::Stream, int)>("cuStreamBeginCapture_v2");
    auto *const end = symbol<int(phx::cuda::Stream, void **)>("cuStreamEndCapture");
    auto *const make = symbol<int(void **, void *, unsigned long long)>("cuGraphInstantiateWithFlags");
    CHECK(begin(stream.get(), 1) == 0);  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other ranks may be threads beside this
    function();
    CHECK(end(stream.get(), &captured_) == 0 && make(&made_, captured_, 0) == 0);
  }
  ~Graph() {
    const Gpu gpu;
    if (made_ != nullptr) symbol<int(void *)>("cuGraphExecDestroy")(made_);
    if (captured_ != nullptr) symbol<int(void *)>("cuGraphDestroy")(captured_);
  }
  Graph(const Graph &) = delete;
  Graph &operator=(const Graph &) = delete;
  void replay() const {
    const Gpu gpu;
    CHECK(symbol<int(void *, phx::cuda::Stream)>("cuGraphLaunch")(made_, stream_.get()) == 0);
  }

 private:
  const OwnStream &stream_;
  void *captured_ = nullptr, *made_ = nullptr;
};

}  // namespace gpu
