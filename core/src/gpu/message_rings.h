// The messages of one group between memory of GPUs: the rings that this rank has to and from others, and what is put on
// streams for them. See gpu/message_ring.h.
//
// They are not collective, so a rank makes its rings to all others by itself, at its first message, and passes them on.
// A rank that receives from another one for the first time waits, on the host, until that one has made its own.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "base/deadline.h"
#include "gpu/memory.h"
#include "gpu/message_ring.h"
#include "gpu/stream_order.h"
#include "group/turn.h"
#include "world/allocator.h"

namespace phx {

class Group;
namespace cuda {
class DeviceWords;
}

// One of them, checked.
struct GpuMessage {
  bool sends;
  int peer;  // group rank
  char *data;
  cuda::Label label;
};

class GpuMessageRings {
 public:
  explicit GpuMessageRings(Group &group);
  GpuMessageRings(const GpuMessageRings &) = delete;
  GpuMessageRings &operator=(const GpuMessageRings &) = delete;

  // Puts all of them on the stream as one kernel, and returns. Waits for the first message, in any direction, of ranks
  // from which this one has not received before.
  phx_status put(const char *operation, int32_t index, const std::vector<GpuMessage> &messages, int64_t timeout_ms,
                 void *stream);

 private:
  struct Path {
    TurnMutex making;
    std::atomic<bool> made{false};  // written last; what follows is valid then
    cuda::MemoryPtr memory;
    uint32_t chunk_bytes = 0;
    cuda::StreamOrder order;  // with mutex_ held
  };
  struct Line;  // what a rank tells another of a ring

  phx_status open(const char *operation, int32_t index);
  phx_status check(const char *operation, const std::vector<GpuMessage> &messages, void *stream, bool *capturing) const;
  phx_status make(const char *operation, const std::vector<GpuMessage> &messages, const Deadline &deadline,
                  bool capturing);
  phx_status show(const char *operation, const Deadline &deadline);
  // Waits until no other thread makes the path whose turn this is.
  phx_status take_turn_to_make(const char *operation, Turn *turn, const Deadline &deadline);
  phx_status build(const char *operation, int to, const Deadline &deadline);
  phx_status find(const char *operation, int from, const Deadline &deadline);
  phx_status launch(const char *operation, const std::vector<GpuMessage> &messages, int64_t timeout_ms, void *stream,
                    bool capturing);
  Path &path_of(const GpuMessage &message) { return (message.sends ? to_ : from_)[message.peer]; }
  const cuda::Memory &memory_of(const GpuMessage &message) const;
  uint32_t list(const std::vector<GpuMessage> &messages, cuda::Exchange *out, std::vector<Path *> *paths);
  uint32_t most_blocks() const;

  Group &group_;
  std::mutex mutex_;
  AllocatorRef allocator_;
  cuda::Gpus *gpus_ = nullptr;
  cuda::Gpu gpu_;
  std::atomic<bool> open_{false};  // written last; all before is valid then
  cuda::MemoryPtr cursors_;        // of all rings' lanes: those to ranks, then those from them
  std::shared_ptr<cuda::DeviceWords> words_;
  // They wait for what was put on streams last, which with its timeout ends.
  std::deque<Path> to_, from_;  // by group rank; that from this rank to itself is one
};

}  // namespace phx
