// A thread that sleeps in epoll and serves listening sockets and the connections that come in through them.
//
// A connection is a stranger until its handshake is over. Strangers are limited in number and time, so that they
// neither keep ranks out nor use up the descriptors of this process; each listening socket has limits of its own, so
// that strangers at one keep nobody from the other. A forked child closes its copies at once: one that kept a listening
// socket would make its parent seem alive for as long as the child lives.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
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
  struct Limits {  // of one listening socket
    size_t strangers = 0;
    int64_t handshake_ms = 0;  // per connection
    int64_t crowded_ms = 0;    // used instead while the limit of strangers is reached, to let others in
  };
  EventLoop() = default;

  // Creates the descriptors and starts the thread. Errors are recorded for `operation`. `thread_name` has at most 15
  // characters; debuggers and `top -H` show it.
  phx_status start(const char *operation, const char *thread_name, Fd listener, const Limits &limits);
  // Serves one more listening socket from now on; any thread may call it. False, with errno set, if that is impossible.
  bool add_listener(Fd listener, const Limits &limits);
  // Ends the thread and closes the listeners. The destructor of the derived class must call it if nothing did before.
  void stop();
  bool runs() const { return thread_.joinable(); }

  // May be called by any thread.
  bool watch_fd(int fd, uint32_t events = EPOLLIN) const { return control(EPOLL_CTL_ADD, fd, events); }
  bool change_events(int fd, uint32_t events) const { return control(EPOLL_CTL_MOD, fd, events); }
  void unwatch_fd(int fd) const { control(EPOLL_CTL_DEL, fd, 0); }

  // Only the thread uses the rest. Each virtual function may throw.
  void end_handshake(int fd);  // whether it succeeded or failed
  // A new stranger, not watched yet. `listener`: 0 for the socket of start(), then that of each add_listener().
  virtual void on_accept(Fd fd, size_t listener) = 0;
  virtual void on_late(int fd) = 0;  // its handshake took too long; must call end_handshake
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
  struct Listener {
    Limits limits;
    Fd fd;
    size_t strangers = 0;  // that came in through it
    bool watched = true;   // by epoll; this and `strangers` are the thread's own
  };
  struct Stranger {
    int64_t since_ns;  // when it was accepted
    size_t listener;
  };
  static constexpr size_t kMostListeners = 2;

  void accept_all(size_t index);
  void drop_late_strangers();
  bool may_accept(const Listener &listener) const {
    return listener.strangers < listener.limits.strangers && accept_again_ns_ == 0 && has_room();
  }
  static int64_t handshake_ns(const Listener &listener);
  int timeout_ms() const;

  Fd epoll_, wake_;
  std::mutex listen_mutex_;                // of add_listener and stop
  std::atomic<size_t> listener_count_{0};  // release, after the new one is complete; pairs with the thread's acquire
  Listener listeners_[kMostListeners];
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::atomic<int> accept_error_{0};

  // Only the thread uses these.
  std::map<int, Stranger> strangers_;  // by descriptor
  int64_t accept_again_ns_ = 0;        // 0, or when to accept again after a lack of descriptors or memory
};

}  // namespace phx
