// What torch's profilers and execution-trace observers see of a call: an event record_param_comms, as torch's NCCL
// back end writes it. HTA, Chakra and torch's distributed view read it.
#pragma once

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace phalanx {

// One collective or message.
struct Comms {
  std::string name;  // as torch's NCCL back end calls it
  std::vector<at::Tensor> inputs, outputs;
  int64_t in_count = 0, out_count = 0;  // of elements
  bool async = true;
  int64_t rank = -1;  // of the root or the peer, in the group; -1: there is none
  std::vector<int64_t> in_splits, out_splits;
  bool message = false;
};

// The group of it.
struct Members {
  std::string name, description;
  int64_t rank = 0;            // this one, in the group
  std::vector<int64_t> ranks;  // the global ones, in order
};

// The event, which ends with this object, on the thread that made it. A default one is none.
class Recording {
 public:
  Recording() = default;
  // `sequence`: of the collective in its group, as the core's recorder has it; a message has a count of its own.
  Recording(const Members &members, Comms comms, uint64_t sequence);
  Recording(const Recording &) = delete;
  Recording &operator=(const Recording &) = delete;

  // What the innermost recorded call on this thread reads, for the event of its work; nothing where none is recorded.
  static const std::optional<std::vector<at::Tensor>> &inputs() {
    return alive_.load(std::memory_order_relaxed) == 0 ? kNone : inputs_of_thread();
  }

 private:
  struct Event;
  struct End {
    void operator()(Event *event) const;
  };
  static const std::optional<std::vector<at::Tensor>> &inputs_of_thread();
  static const std::optional<std::vector<at::Tensor>> kNone;
  static std::atomic<int> alive_;  // on all threads

  std::unique_ptr<Event, End> event_;
};

// Whether a profiler or an observer runs. Without one, nothing is recorded and a call costs this look.
inline bool is_recorded() { return __builtin_expect(at::hasCallbacks(), 0); }

}  // namespace phalanx
