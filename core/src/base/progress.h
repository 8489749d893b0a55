// Advances the operations that a rank has started but not completed, while the rank waits for something else.
//
// A thread that waits for long polls, and, if the world was made so, the thread of the world does. Otherwise a rank
// that waits on one group, while a peer waits for an operation that this rank started on another group, would be in a
// deadlock that is not in the program.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/deadline.h"

namespace phx {

class Progress;

// Something that has pending operations at times: the engine of a channel, or the messages of a group. It reports each
// with Progress::began and ended.
class ProgressSource {
 public:
  virtual ~ProgressSource();  // no operation may be pending
  // Advances the operations that can advance without waiting for a peer or a lock. Returns whether any did.
  virtual bool advance_pending() = 0;
  // For a source that is watched: a descriptor that becomes readable when there may be something to advance. -1: look
  // again soon.
  virtual int arm() { return -1; }

 private:
  friend class Progress;
  Progress *progress_ = nullptr;        // NULL before Progress::add
  std::weak_ptr<ProgressSource> self_;  // keeps the object that contains this one alive while locked
  std::atomic<int> pending_{0};
  std::atomic<bool> listed_{false};
};

// The sources of one world that have pending operations. Idle sources cost nothing, however many there are.
class Progress {
 public:
  // Before the first operation: `attend` is called when there is something for another thread to advance, with a lock
  // of its source held. That thread then calls `step` now and then until it returns false. `always`: there is, whenever
  // an operation is pending; else only while a source insists.
  void set_attendant(std::function<void()> attend, bool always) {
    attend_ = std::move(attend);
    always_ = always;
  }
  struct Next {
    bool again;  // call `step` again: soon, or when the descriptor is readable, or at the latest after a second
    int fd;      // -1: none
  };
  Next step();
  static bool is_attendant() { return attends_; }  // whether this thread is in `step`
  // To be called once for each source, before its first operation.
  void add(const std::shared_ptr<ProgressSource> &source);
  void began(ProgressSource &source) {
    pending_.fetch_add(1, std::memory_order_relaxed);
    // seq_cst, like the load below and the two accesses in `poll`: either this thread sees that the source is no longer
    // listed, or `poll` sees that it has a pending operation.
    source.pending_.fetch_add(1, std::memory_order_seq_cst);
    if (!source.listed_.load(std::memory_order_seq_cst)) list(source);
  }
  // The source stays in the list until the next poll.
  void ended(ProgressSource &source) {
    source.pending_.fetch_sub(1, std::memory_order_relaxed);
    pending_.fetch_sub(1, std::memory_order_relaxed);
  }
  // The same for an operation that must go on though this rank calls nothing.
  void insist(ProgressSource &source) {
    began(source);
    ++insisted_;
    call_attendant();
  }
  void relent(ProgressSource &source) {
    --insisted_;
    ended(source);
  }
  // As insist and relent, for a source whose `arm` says when there is something to do. All sources that are watched at
  // a time wait for the same descriptor.
  void watch(ProgressSource &source);
  void unwatch(ProgressSource &source);
  void call_attendant();
  bool pending() const { return pending_.load(std::memory_order_relaxed) > 0; }
  // Advances the listed sources except `caller`, which holds its own lock. Returns whether any advanced.
  bool poll(const ProgressSource *caller);

  // For waits on anything but a word in shared memory: calls wait(deadline), in slices while operations are pending.
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
  void drop_idle();  // this and the next with the mutex held
  void call_attendant_locked();

  std::mutex mutex_;
  std::vector<ProgressSource *> sources_, watched_;
  inline static thread_local bool attends_ = false;
  std::function<void()> attend_;
  bool always_ = false;
  std::atomic<int> insisted_{0};
  int steps_left_ = 0;  // that find nothing to do before the attendant goes; 0: it is not there
};

}  // namespace phx
