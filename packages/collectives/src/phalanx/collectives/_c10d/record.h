// Shows a call to torch's profilers and execution-trace observers: an event record_param_comms, as torch's NCCL back
// end writes it. HTA, Chakra and torch's distributed view read it.
#pragma once

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace phalanx {

// One collective or message.
struct Comms {
  std::string name;  // as torch's NCCL back end calls it
  std::vector<at::Tensor> inputs, outputs;
  int64_t in_count = 0, out_count = 0;  // numbers of elements
  bool async = true;
  int64_t rank = -1;  // group rank of the root or the peer; -1: there is none
  std::vector<int64_t> in_splits, out_splits;
  bool message = false;
};

// The group of the call.
struct Members {
  std::string name, description;
  int64_t rank = 0;            // group rank of this process
  std::vector<int64_t> ranks;  // global ranks, in order
};

// The event. It ends with this object, on the thread that made it. A default object records nothing.
class Recording {
 public:
  Recording() = default;
  // `sequence`: the number of the collective in its group, as in the core's recorder; messages are counted separately.
  Recording(const Members &members, Comms comms, uint64_t sequence);
  Recording(const Recording &) = delete;
  Recording &operator=(const Recording &) = delete;

  // The inputs of the innermost recorded call on this thread, for the event of its work; nullopt if none is recorded.
  static std::optional<std::vector<at::Tensor>> inputs();

 private:
  struct Event;
  std::shared_ptr<Event> event_;
};

// Whether a profiler or an observer runs. Without one, nothing is recorded and a call costs this look.
inline bool is_recorded() { return __builtin_expect(at::hasCallbacks(), 0); }

}  // namespace phalanx
