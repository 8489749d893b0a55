// What a rank has started and not completed moves on while the rank waits for something else.
//
// There is no thread for it: whoever waits for long polls. Without that, a rank that waits on one group while a peer
// waits for an operation that this rank started on another would be a deadlock that neither program contains.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "base/deadline.h"
#include "phalanx/phalanx.h"

namespace phx {

// Something with operations under way: the engine of a channel, or the messages of a group.
class ProgressSource {
 public:
  virtual ~ProgressSource() = default;
  // Moves on what can move without waiting, neither for a peer nor for a lock.
  virtual void advance_pending() = 0;
};

// The sources of one world.
class Progress {
 public:
  void add(std::weak_ptr<ProgressSource> source);
  // A source says when it begins and ends to have something under way.
  void began() { pending_.fetch_add(1, std::memory_order_relaxed); }
  void ended() { pending_.fetch_sub(1, std::memory_order_relaxed); }
  bool pending() const { return pending_.load(std::memory_order_relaxed) > 0; }
  // `caller` is passed over: it holds its own lock.
  void poll(const ProgressSource *caller);

  // For waits that are no words in shared memory: calls wait(deadline), in slices while something is under way.
  template <class Wait>
  phx_status keep_going(const Deadline &deadline, Wait wait) {
    for (;;) {
      if (!pending()) return wait(deadline);
      const phx_status status = wait(Deadline::after_ms(1));
      if (status != PHX_ERR_TIMEOUT || deadline.passed()) return status;
      poll(nullptr);
    }
  }

 private:
  std::atomic<int> pending_{0};
  std::mutex mutex_;
  std::vector<std::weak_ptr<ProgressSource>> sources_;
};

}  // namespace phx
