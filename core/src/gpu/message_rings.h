// The messages of one group between memory of GPUs: the rings of this rank to and from others, and the launches of the
// kernel that moves messages. See gpu/message_ring.h.
//
// Messages are not collective, so a rank builds its rings to all others by itself, at its first message, and announces
// them. A rank that receives from a peer for the first time waits, on the host, until that peer has announced its ring.
#pragma once

#include <atomic>
#include <deque>
#include <vector>

#include "base/wait.h"
#include "gpu/memory.h"
#include "gpu/message_ring.h"
#include "gpu/stream_order.h"

namespace phx {

class Group;

// A checked message.
struct GpuMessage {
  bool sends;
  int peer;  // group rank
  char *data;
  cuda::Label label;
};

class GpuMessageRings {
 public:
  explicit GpuMessageRings(Group &group);

  // Puts all messages on the stream as one kernel. If this rank receives from a peer for the first time, it first waits
  // until that peer makes its first message, in any direction.
  phx_status put(const char *operation, int32_t index, const std::vector<GpuMessage> &messages, int64_t timeout_ms,
                 void *stream);

 private:
  struct Path {
    TurnMutex mutex;                 // held by the thread that makes the path
    std::atomic<bool> ready{false};  // written last; the members below are valid then
    cuda::MemoryPtr memory;
    uint32_t chunk_bytes = 0;
    cuda::StreamOrder order;  // guarded by GpuMessageRings::mutex_
  };

  phx_status open(const char *operation, int32_t index);
  phx_status check(const char *operation, const std::vector<GpuMessage> &messages, void *stream, bool *capturing) const;
  phx_status make(const char *operation, const std::vector<GpuMessage> &messages, const Deadline &deadline,
                  bool capturing);
  // Waits until no other thread makes the path to which `turn` belongs.
  phx_status build(const char *operation, int to, const Deadline &deadline);
  phx_status map(const char *operation, int from, const Deadline &deadline);
  phx_status launch(const char *operation, const std::vector<GpuMessage> &messages, int64_t timeout_ms, void *stream,
                    bool capturing);
  Path &path_of(const GpuMessage &message) { return (message.sends ? to_ : from_)[message.peer]; }
  uint32_t list(const std::vector<GpuMessage> &messages, cuda::Exchange *out, std::vector<Path *> *paths);
  uint32_t most_blocks() const;

  Group &group_;
  std::mutex mutex_;
  AllocatorRef allocator_;
  cuda::Gpus *gpus_ = nullptr;  // NULL until `open` has set it and the members around it
  cuda::Gpu gpu_;
  cuda::MemoryPtr cursors_;          // for the lanes of all rings to ranks, and then of those from ranks
  std::shared_ptr<uint32_t> words_;  // of the group: see GpuGroup::open_words
  // By group rank; a rank's ring to itself lies in to_. Destructors wait for the last launches, which have timeouts.
  std::deque<Path> to_, from_;
};

}  // namespace phx
