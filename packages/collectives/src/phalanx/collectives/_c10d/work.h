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

// What an operation reads and writes.
struct Buffers {
  std::vector<at::Tensor> keep;                           // alive until the operation is complete
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // (destination, source), made when it is complete
  std::vector<at::Tensor> outputs;                        // the value of the future
  bool staged = false;                                    // tensors that are written share memory: `copies` for all
};

// Python sees it as phalanx.core.InvalidArgumentError, which is a ValueError and a RuntimeError.
class InvalidArgument final : public c10::ValueError {
 public:
  using ValueError::ValueError;
};

// Exceptions that Python sees as InvalidArgumentError, NotImplementedError or torch.distributed.DistBackendError.
[[noreturn]] void throw_status(phx_status status, const std::string &text);

// Throws what a signal handler of Python has raised while this thread waited in the core, if there is something. Set by
// module.cpp, which knows Python.
extern void (*throw_interruption)(const std::string &text);

// The text of an error of the core, which begins with the name of what was called through torch.
std::string named(const char *title, const std::string &text);

// Complete when somebody waits for it or asks, or, once it has a future, by the engine's thread. Until then the engine
// holds it, so that its buffers live though the caller has dropped it.
//
// What is on the stream of a GPU is complete when the stream has come past it: then `wait` lets the current stream wait
// (and the host too, if it is a barrier). What goes wrong there is raised by a later call on the group.
class Work final : public c10d::Work {
 public:
  Work(std::shared_ptr<Engine> engine, c10d::OpType type, const char *title, Buffers buffers, uint64_t sequence,
       Milliseconds timeout);
  ~Work() override;

  // Once, by whoever made it: `handle` is what the core started, which this takes over.
  void started(phx_work *handle);
  // Or it was complete at once, and nobody else has it yet.
  void completed();
  // Or it was put on this stream, which is the current one.
  void put_on(const c10::Stream &stream);
  // Before that: what it reads and writes is used on another stream than the one that it was made on.
  void used_on(const c10::Stream &stream) const;
  // Whether it is complete, successfully or not, or its time is over: then poll completes it. Runs no callbacks.
  bool is_over() const;
  // Asks the core. Returns whether it is complete, successfully or not; then its future is, and callbacks have run.
  // `enforce`: raises the timeout of the operation, which otherwise shows in wait only.
  bool poll(bool enforce);
  // For the end of the group: waits until then, at most. `failed`: the group has failed, and so will this.
  void drain(Clock::time_point until, bool failed);

  const char *title() const { return title_; }
  bool is_message() const { return receives() || opType_ == c10d::OpType::SEND; }
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(Milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override;

 private:
  bool receives() const;
  phx_work *handle() const;  // one reference to it, or null
  void end(phx_status status, const char *text);
  void settle(phx_status status, const char *text);
  void mark(const c10::intrusive_ptr<c10::ivalue::Future> &future);
  void rethrow() const;
  bool has_passed() const;  // the stream, if there is one

  const std::shared_ptr<Engine> engine_;
  const char *const title_;
  Buffers buffers_;
  const uint64_t sequence_;
  const Milliseconds timeout_;
  Clock::time_point deadline_;  // once it has started
  std::atomic<bool> done_{false};
  mutable std::mutex lock_;  // of what follows, until done_
  phx_work *handle_ = nullptr;
  std::exception_ptr error_;
  int source_ = -1;
  std::optional<c10::Stream> stream_;
  std::optional<c10::Event> event_;  // after it on the stream
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};
using WorkRef = c10::intrusive_ptr<Work>;

}  // namespace phalanx
