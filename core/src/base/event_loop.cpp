#include "base/event_loop.h"

#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <future>
#include <system_error>

#include "base/deadline.h"
#include "base/error.h"
#include "base/thread.h"

namespace phx {
namespace {

constexpr int kEventsAtOnce = 64;
constexpr int kAcceptsAtOnce = 64;                  // then existing connections get their turn
constexpr int64_t kAcceptPauseNs = 10 * 1000000LL;  // after accept() failed for lack of descriptors or memory

}  // namespace

// ---- from any thread

phx_status EventLoop::start(const char *operation, const char *thread_name, Fd listener, const Limits &limits) {
  epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !wake_.valid() || !watch_fd(wake_.get()) || !add_listener(std::move(listener), limits))
    return fail_errno(errno, operation, "could not make epoll or eventfd");
  std::promise<void> ready;
  const std::future<void> is_ready = ready.get_future();
  try {
    const SignalsBlocked blocked;  // in the thread too, so that the application's threads receive them
    thread_ = std::thread([this, thread_name, ready = std::move(ready)]() mutable {
      pthread_setname_np(pthread_self(), thread_name);
      last_error();  // a thread's first use of it allocates memory, and without memory that would end the process
      ready.set_value();
      run();
    });
  } catch (const std::system_error &error) {
    return fail_errno(error.code().value(), operation, "could not start the thread '%s'", thread_name);
  }
  is_ready.wait();
  return PHX_OK;
}

bool EventLoop::add_listener(Fd listener, const Limits &limits) {
  const std::lock_guard<std::mutex> lock(listen_mutex_);
  const size_t index = listener_count_.load(std::memory_order_relaxed);
  errno = EINVAL;
  if (stopping_.load() || index == kMostListeners) return false;
  listeners_[index].limits = limits;
  listeners_[index].fd = std::move(listener);
  listener_count_.store(index + 1, std::memory_order_release);
  return watch_fd(listeners_[index].fd.get());
}

void EventLoop::stop() {
  stopping_.store(true);
  wake();
  if (thread_.joinable()) thread_.join();
  const std::lock_guard<std::mutex> lock(listen_mutex_);
  for (Listener &listener : listeners_) {
    // Closing it would not stop it from listening while a forked child holds a copy.
    if (listener.fd.valid()) shutdown(listener.fd.get(), SHUT_RDWR);
    listener.fd.reset();
  }
}

void EventLoop::wake() {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);  // it fails only if the counter is full; then the thread wakes anyway
}

bool EventLoop::control(int operation, int fd, uint32_t events) const {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  return epoll_ctl(epoll_.get(), operation, fd, &event) == 0;
}

void EventLoop::after_fork_in_child() {
  for (Listener &listener : listeners_) listener.fd.reset();
  epoll_.reset();
  wake_.reset();
}

// ---- the thread

void EventLoop::run() {
  while (!stopping_.load()) {
    try {
      serve();
    } catch (const std::exception &error) {  // nothing is lost: epoll reports unhandled events again
      if (!goes_on_after(error)) return;
    }
  }
}

void EventLoop::serve() {
  epoll_event events[kEventsAtOnce];
  const int count = epoll_wait(epoll_.get(), events, kEventsAtOnce, timeout_ms());
  const size_t listener_count = listener_count_.load(std::memory_order_acquire);
  bool newcomers[kMostListeners] = {};
  for (int i = 0; i < count; ++i) {
    const int fd = events[i].data.fd;
    size_t index = 0;
    while (index < listener_count && listeners_[index].fd.get() != fd) ++index;
    if (index < listener_count) {
      // Accept last: connections that end their handshake make room first, and no accepted one gets the number of a
      // descriptor that was closed while events for that number were still to come.
      newcomers[index] = true;
    } else if (fd == wake_.get()) {
      uint64_t wakes;
      (void)!read(fd, &wakes, sizeof wakes);
      on_wake();
    } else {
      on_event(fd, events[i].events);
    }
  }
  drop_late_strangers();
  for (size_t i = 0; i < listener_count; ++i)
    if (newcomers[i]) accept_all(i);
  after_events(count > 0);
  if (accept_again_ns_ != 0 && now_ns() >= accept_again_ns_) accept_again_ns_ = 0;
  for (size_t i = 0; i < listener_count; ++i) {
    Listener &listener = listeners_[i];
    if (listener.watched == may_accept(listener)) continue;
    listener.watched = !listener.watched;
    change_events(listener.fd.get(), listener.watched ? EPOLLIN : 0u);
  }
}

void EventLoop::accept_all(size_t index) {
  Listener &listener = listeners_[index];
  for (int i = 0; i < kAcceptsAtOnce && may_accept(listener); ++i) {
    Fd fd(accept4(listener.fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    const int error = fd.valid() ? 0 : errno;
    if (error == EINTR || error == ECONNABORTED) continue;
    if (error == EAGAIN || error == EWOULDBLOCK) return;
    accept_error_.store(error);
    if (error != 0) {  // without a pause this would be a busy loop: the listener stays readable
      accept_again_ns_ = now_ns() + kAcceptPauseNs;
      return;
    }
    strangers_.emplace(fd.get(), Stranger{now_ns(), index});
    listener.strangers += 1;
    on_accept(std::move(fd), index);
  }
}

void EventLoop::end_handshake(int fd) {
  const auto stranger = strangers_.find(fd);
  if (stranger == strangers_.end()) return;
  listeners_[stranger->second.listener].strangers -= 1;
  strangers_.erase(stranger);
}

int64_t EventLoop::handshake_ns(const Listener &listener) {
  const bool crowded = listener.strangers >= listener.limits.strangers;
  return (crowded ? listener.limits.crowded_ms : listener.limits.handshake_ms) * 1000000;
}

void EventLoop::drop_late_strangers() {
  if (strangers_.empty()) return;
  int64_t too_old_ns[kMostListeners] = {};
  const size_t count = listener_count_.load(std::memory_order_acquire);
  for (size_t i = 0; i < count; ++i) too_old_ns[i] = now_ns() - handshake_ns(listeners_[i]);
  for (auto it = strangers_.begin(); it != strangers_.end();) {
    const auto stranger = it++;
    if (stranger->second.since_ns <= too_old_ns[stranger->second.listener]) on_late(stranger->first);
  }
}

int EventLoop::timeout_ms() const {
  int64_t next_ns = next_look_ns();
  if (accept_again_ns_ != 0) next_ns = std::min(next_ns, accept_again_ns_);
  for (const auto &stranger : strangers_) {
    const Listener &listener = listeners_[stranger.second.listener];
    next_ns = std::min(next_ns, stranger.second.since_ns + handshake_ns(listener));
  }
  if (next_ns == INT64_MAX) return -1;
  return static_cast<int>(std::clamp<int64_t>((next_ns - now_ns() + 999999) / 1000000, 0, 60000));
}

}  // namespace phx
