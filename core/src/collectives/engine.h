// Runs the operations of one group: one after another through the lane, blocking or split into start and wait.
#pragma once

#include <deque>
#include <memory>
#include <mutex>

#include "base/error.h"
#include "collectives/operation.h"
#include "group/lane.h"

namespace phx {

class Group;

// A started operation. The engine's queue and the caller's handle share it.
struct Work {
  std::unique_ptr<Operation> operation;
  std::atomic<int32_t> state{PHX_IN_PROGRESS};
  phx_error_info error = make_error_info();  // written before state, valid when it is negative
};
using WorkRef = std::shared_ptr<Work>;

class Engine {
 public:
  Engine(Group *group, Lane *lane) : group_(group), lane_(lane) {}

  phx_status run(Operation &operation, int64_t timeout_ms);
  phx_status start(std::unique_ptr<Operation> operation, int64_t timeout_ms, WorkRef *out);
  phx_status wait(const WorkRef &work, int64_t timeout_ms);
  phx_status test(const WorkRef &work);
  uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

 private:
  phx_status begin(Operation &operation, LazyDeadline &deadline);
  phx_status publish(Operation &operation, LazyDeadline &deadline);
  phx_status advance(Operation &operation, LazyDeadline &deadline, bool may_block);
  phx_status complete_front(LazyDeadline &deadline, bool may_block);
  phx_status make_room(LazyDeadline &deadline);
  void settle(Work &work, phx_status status);
  phx_status raise(const AwaitResult &result, const Operation &operation, uint32_t round, const LazyDeadline &deadline);
  static phx_status report(const Work &work);

  Group *const group_;
  Lane *const lane_;
  std::mutex mutex_;             // one collective of a group at a time; its waits are bounded, so is this
  std::deque<WorkRef> pending_;  // started, not complete, in the order of their epochs
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace phx

struct phx_work {
  std::atomic<int64_t> references{1};
  std::shared_ptr<phx::Group> group;
  phx::WorkRef ptr;
};
