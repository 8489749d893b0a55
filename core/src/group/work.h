// An operation that was started and completes later. The queue of its creator and the caller's handle share it.
#pragma once

#include <atomic>
#include <memory>

#include "base/error.h"
#include "phalanx/phalanx.h"

namespace phx {

class Work {
 public:
  virtual ~Work() = default;
  // Blocks until it is complete or failed. PHX_ERR_TIMEOUT is final as well: it revokes the group. A negative timeout:
  // see LazyDeadline.
  virtual phx_status wait(int64_t timeout_ms) = 0;
  virtual phx_status test() = 0;  // never blocks

  phx_status state() const { return state_.load(std::memory_order_acquire); }
  bool complete() const { return state() != PHX_IN_PROGRESS; }
  const ErrorInfo &error() const { return error_; }  // valid when the state is negative
  int32_t source() const { return source_; }         // valid when the state is PHX_OK; -1: not a receive

  // Returns the state, and makes an error this thread's last error.
  phx_status report() const {
    const phx_status status = state();
    return status < 0 ? set_last_error(error_) : status;
  }

  // Called by its creator, once. A negative status stores this thread's last error.
  void settle(phx_status status, int32_t source = -1) {
    if (status < 0) error_ = last_error();
    source_ = source;
    state_.store(status, std::memory_order_release);
  }

 private:
  std::atomic<int32_t> state_{PHX_IN_PROGRESS};
  ErrorInfo error_;
  int32_t source_ = -1;
};
using WorkRef = std::shared_ptr<Work>;

}  // namespace phx
