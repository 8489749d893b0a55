// A thread that sleeps in epoll and serves a listening socket and the connections that come in through it.
//
// A connection is a stranger until its handshake is over. Strangers are limited in number and time, so that they
// neither keep ranks out nor use up the descriptors of this process. A forked child closes its copies at once: one that
// kept the listening socket would make its parent seem alive for as long as the child lives.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <thread>

#include "base/fd.h"
#include "base/fork.h"
#include "phalanx/phalanx.h"

namespace phx {

class EventLoop : private ForkHook {
 public:
  void wake();  // lets the thread call after_events() soon
  // Why the last connection could not be accepted: an errno, or 0.
  int accept_error() const { return accept_error_.load(); }

 protected:
  struct Limits {
    size_t strangers;
    int64_t handshake_ms;  // per connection
    int64_t crowded_ms;    // used instead while the limit of strangers is reached, to let others in
  };
  explicit EventLoop(const Limits &limits) : limits_(limits) {}

  // Creates the descriptors and starts the thread. Errors are recorded for `operation`.
  phx_status start(const char *operation, const char *thread_name, Fd listener);
  // Ends the thread and closes the listener. The destructor of the derived class must call it if nothing did before.
  void stop();
  bool runs() const { return thread_.joinable(); }

  // May be called by any thread.
  bool watch_fd(int fd, uint32_t events = EPOLLIN) const { return control(EPOLL_CTL_ADD, fd, events); }
  bool change_events(int fd, uint32_t events) const { return control(EPOLL_CTL_MOD, fd, events); }
  void unwatch_fd(int fd) const { control(EPOLL_CTL_DEL, fd, 0); }

  // Only the thread uses the rest. Each virtual function may throw.
  void end_handshake(int fd) { strangers_.erase(fd); }  // whether it succeeded or failed
  size_t strangers() const { return strangers_.size(); }
  virtual void on_accept(Fd fd) = 0;  // a new stranger, not watched yet
  virtual void on_late(int fd) = 0;   // its handshake took too long; must call end_handshake
  virtual void on_event(int fd, uint32_t events) = 0;
  virtual void on_wake() {}
  virtual void after_events(bool any) = 0;
  virtual bool has_room() const { return true; }                // for one more connection
  virtual int64_t next_look_ns() const { return INT64_MAX; }    // when to call after_events without an event
  virtual bool goes_on_after(const std::exception &error) = 0;  // whether to go on after a function threw it

 private:
  void after_fork_in_child() override;
  bool control(int operation, int fd, uint32_t events) const;
  void run();
  void serve();
  void accept_all();
  void drop_late_strangers();
  bool may_accept() const { return strangers_.size() < limits_.strangers && accept_again_ns_ == 0 && has_room(); }
  int64_t handshake_ns() const;
  int timeout_ms() const;

  const Limits limits_;
  Fd epoll_, wake_, listener_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::atomic<int> accept_error_{0};

  // Only the thread uses these.
  std::map<int, int64_t> strangers_;  // by descriptor: when it was accepted
  bool listening_ = true;             // whether epoll watches the listener
  int64_t accept_again_ns_ = 0;       // 0, or when to accept again after a lack of descriptors or memory
};

}  // namespace phx
