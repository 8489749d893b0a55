// Works: what was started on a group, as torch.distributed sees it.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core_api.h"
#include "record.h"

namespace phalanx {

class Engine;

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// A timeout as the core takes it, where 0 would be the default: zero and less are 1 ms, over at once. timedelta.max, or
// what torch makes of it (its microseconds overflow into 185,000 years before now), is the core's longest wait. As
// phalanx.core.timeouts.
inline constexpr Milliseconds kLongest{int64_t{1} << 40};
inline Milliseconds limited(Milliseconds timeout) {
  if (timeout < Milliseconds(-(int64_t{1} << 52))) return kLongest;
  return std::min(std::max(timeout, Milliseconds(1)), kLongest);
}

// The tensors that an operation reads and writes.
struct Buffers {
  std::vector<at::Tensor> keep;                           // alive until the operation is complete
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // (destination, source), made when it is complete
  std::vector<at::Tensor> outputs;                        // the value of the future
  bool staged = false;                                    // tensors that are written share memory: `copies` for all
};

// Python sees it as phalanx.core.InvalidArgumentError, which is a ValueError and a RuntimeError.
class InvalidArgument final : public c10::ValueError {
 public:
  explicit InvalidArgument(const std::string &text)
      : ValueError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text) {}
};
template <class... Parts>
void require(bool fits, const Parts &...text) {
  if (!fits) throw InvalidArgument(c10::str(text...));
}

// Exceptions that Python sees as InvalidArgumentError, NotImplementedError or torch.distributed.DistBackendError.
[[noreturn]] void throw_status(phx_status status, const std::string &text);

// Throws the exception that a signal handler of Python raised while this thread waited in the core, if there is one.
// module.cpp sets it, because it knows Python.
extern void (*throw_interruption)(const std::string &text);

// The text of an error of the core, which begins with the name of what was called through torch.
std::string named(const char *title, const std::string &text);

c10::Stream current_stream(const at::Device &device);

// A work is completed by a thread that waits for it or asks whether it is complete, or, if it has a future, by a thread
// of the engine. Until then the engine holds it, so that its buffers live although the caller has dropped it.
//
// A work on the stream of a GPU is complete when the stream has passed it. `wait` lets the current stream wait for it,
// and a barrier the host, too. Its errors are raised by a later call on the group.
class Work final : public c10d::Work {
 public:
  Work(std::shared_ptr<Engine> engine, c10d::OpType type, const char *title, Buffers &&buffers, uint64_t sequence,
       Milliseconds timeout, bool recorded = is_recorded());
  ~Work() override;

  // Called once, by the function that made the work: takes over the handle of the operation that the core started.
  void started(phx_work *handle);
  // Called instead of `started` if the operation is complete already. No other thread has the work yet.
  void completed() { end(PHX_OK, ""); }
  // Called instead of `started` if the operation was put on this stream, which is the current one.
  void put_on(const c10::Stream &stream);
  // Called before `put_on` if that is another stream than the one on which the tensors were made.
  void used_on(const c10::Stream &stream) const;
  // Whether the operation is complete, successfully or not, or has timed out: then `poll` completes it. Runs no
  // callbacks.
  bool is_over() const;
  // Asks the core. Returns whether the work is complete, successfully or not; then its future is complete, too, and the
  // callbacks have run. `enforce`: a timeout fails the work now, and not only in `wait`.
  bool poll(bool enforce);
  // At the end of the group: waits until `until` at most. `failed`: the group has failed, so this work will fail, too.
  void drain(Clock::time_point until, bool failed);

  const char *title() const { return title_; }
  bool is_message() const { return receives() || opType_ == c10d::OpType::SEND; }
  bool isCompleted() override;
  bool isSuccess() const override { return is_done() && !error_ && has_passed(); }
  std::exception_ptr exception() const override { return is_done() ? error_ : nullptr; }
  int sourceRank() const override { return is_done() ? source_ : -1; }
  std::vector<at::Tensor> result() override { return buffers_.outputs; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(Milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  bool is_done() const { return done_.load(std::memory_order_acquire); }
  bool receives() const { return opType_ == c10d::OpType::RECV || opType_ == c10d::OpType::RECVANYSOURCE; }
  using Handle = std::unique_ptr<phx_work, decltype(&phx_work_release)>;
  Handle handle() const;  // one reference to it, or null
  void end(phx_status status, const std::string &text);
  void settle(phx_status status, Handle handle);
  void mark(const c10::intrusive_ptr<c10::ivalue::Future> &future);
  bool has_passed() const { return !event_ || event_->query(); }  // the stream, if there is one

  const std::shared_ptr<Engine> engine_;
  const char *const title_;
  Buffers buffers_;
  const uint64_t sequence_;
  const Milliseconds timeout_;
  Clock::time_point deadline_;  // set when the operation starts
  std::atomic<bool> done_{false};
  mutable std::mutex lock_;  // guards the following members, until done_ is set
  phx_work *handle_ = nullptr;
  std::exception_ptr error_;
  int source_ = -1;
  std::optional<c10::Stream> stream_;
  std::optional<c10::Event> event_;  // recorded after the operation on the stream
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};
using WorkRef = c10::intrusive_ptr<Work>;

}  // namespace phalanx
