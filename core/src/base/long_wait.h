// Reports in the log that a thread waits long for other ranks: "rank 0: still waiting for rank 3 on group 'tp':
// all_reduce (10 s of 300 s)". PHALANX_WAIT_WARNING_S says when.
//
// interrupt_requested(), which every wait calls between its slices, looks at the innermost LongWait of its thread. So
// only a wait that sleeps pays for it.
#pragma once

#include <cstdint>
#include <string>

#include "base/deadline.h"

namespace phx {

// Describes a wait: "rank 0: still waiting for rank 3 on group 'tp': all_reduce". Refers to a function object that
// outlives it, and is called on the thread that waits. An empty result: nothing is reported.
class WaitText {
 public:
  WaitText() = default;
  template <class Text>
  explicit WaitText(const Text &text)
      : object_(&text), call_([](const void *object) { return (*static_cast<const Text *>(object))(); }) {}
  explicit operator bool() const { return call_ != nullptr; }
  std::string operator()() const { return call_(object_); }

 private:
  const void *object_ = nullptr;
  std::string (*call_)(const void *object) = nullptr;
};

// A wait whose owner calls look() now and then.
class WaitReport {
 public:
  WaitReport(const WaitText &text, const Deadline &deadline)
      : WaitReport(text, deadline.at_ns(), deadline.budget_ms()) {}
  WaitReport(const WaitText &text, int64_t at_ns, int64_t budget_ms);
  void look();  // logs a line if one is due

 private:
  int64_t lines_due() const;

  const WaitText text_;
  const int64_t begin_ns_, budget_ms_;
  int64_t lines_;  // that were due already
};

// A wait of this thread, while it lives.
class LongWait : public WaitReport {
 public:
  template <class... Args>
  explicit LongWait(const WaitText &text, Args... args) : WaitReport(text, args...), outer_(innermost_) {
    if (text) innermost_ = this;
  }
  LongWait(const LongWait &) = delete;
  LongWait &operator=(const LongWait &) = delete;
  ~LongWait() { innermost_ = outer_; }
  static void look_at_innermost() {
    if (innermost_ != nullptr) innermost_->look();
  }

 private:
  LongWait *const outer_;
  static thread_local LongWait *innermost_;
};

}  // namespace phx
