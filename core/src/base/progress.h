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

class Progress;

// Something with operations under way: the engine of a channel, or the messages of a group. It begins and ends to have
// some by Progress::began and ended.
class ProgressSource {
 public:
  virtual ~ProgressSource();  // has nothing under way any more
  // Moves on what can move without waiting, neither for a peer nor for a lock. Returns whether anything did.
  virtual bool advance_pending() = 0;

 private:
  friend class Progress;
  Progress *progress_ = nullptr;        // that lists it
  std::weak_ptr<ProgressSource> self_;  // shares the ownership of what this is a part of
  std::atomic<int> pending_{0};
  std::atomic<bool> listed_{false};
};

// Those sources of one world that have something under way. Others cost nothing, however many there are.
class Progress {
 public:
  // Once for each source, before it begins anything.
  void add(const std::shared_ptr<ProgressSource> &source);
  void began(ProgressSource &source) {
    pending_.fetch_add(1, std::memory_order_relaxed);
    // seq_cst as the load, and as the two in `poll`: either this sees that it is not in the list any more, or that sees
    // that it has something under way.
    source.pending_.fetch_add(1, std::memory_order_seq_cst);
    if (!source.listed_.load(std::memory_order_seq_cst)) list(source);
  }
  // It stays in the list until the next poll.
  void ended(ProgressSource &source) {
    source.pending_.fetch_sub(1, std::memory_order_relaxed);
    pending_.fetch_sub(1, std::memory_order_relaxed);
  }
  bool pending() const { return pending_.load(std::memory_order_relaxed) > 0; }
  // `caller` is passed over: it holds its own lock. Returns whether anything moved.
  bool poll(const ProgressSource *caller);

  // For waits that are no words in shared memory: calls wait(deadline), in slices while something is under way.
  template <class Wait>
  phx_status keep_going(const Deadline &deadline, Wait wait) {
    for (int64_t slice_ms = 1;;) {
      if (!pending()) return wait(deadline);
      const phx_status status = wait(Deadline::after_ms(slice_ms));
      if (status != PHX_ERR_TIMEOUT || deadline.passed()) return status;
      slice_ms = poll(nullptr) ? 1 : slice_ms < kLongestSliceMs ? slice_ms + 1 : kLongestSliceMs;
    }
  }

 private:
  static constexpr int64_t kLongestSliceMs = 5;

  friend class ProgressSource;
  void list(ProgressSource &source);
  void forget(ProgressSource &source);

  std::atomic<int> pending_{0};
  std::mutex mutex_;
  std::vector<ProgressSource *> sources_;
};

}  // namespace phx
