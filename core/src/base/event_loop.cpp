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

phx_status EventLoop::start(const char *operation, const char *thread_name, Fd listener) {
  listener_ = std::move(listener);
  epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !wake_.valid() || !watch_fd(wake_.get()) || !watch_fd(listener_.get()))
    return fail_errno(errno, operation, "%s: could not make epoll or eventfd", operation);
  std::promise<void> ready;
  const std::future<void> is_ready = ready.get_future();
  try {
    thread_ = start_thread(thread_name, [this, ready = std::move(ready)]() mutable {
      last_error();  // a thread's first use of it allocates memory, and without memory that would end the process
      ready.set_value();
      run();
    });
  } catch (const std::system_error &error) {
    return fail_errno(error.code().value(), operation, "%s: could not start the thread '%s'", operation, thread_name);
  }
  is_ready.wait();
  return PHX_OK;
}

void EventLoop::stop() {
  stopping_.store(true);
  wake();
  if (thread_.joinable()) thread_.join();
  // Closing it would not stop it from listening while a forked child holds a copy.
  if (listener_.valid()) shutdown(listener_.get(), SHUT_RDWR);
  listener_.reset();
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
  listener_.reset();
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
  bool newcomers = false;
  for (int i = 0; i < count; ++i) {
    const int fd = events[i].data.fd;
    if (fd == listener_.get()) {
      newcomers = true;  // accept last: connections that end their handshake make room first, and no accepted one gets
                         // the number of a descriptor that was closed while events for that number were still to come
    } else if (fd == wake_.get()) {
      uint64_t wakes;
      (void)!read(fd, &wakes, sizeof wakes);
      on_wake();
    } else {
      on_event(fd, events[i].events);
    }
  }
  drop_late_strangers();
  if (newcomers) accept_all();
  after_events(count > 0);
  if (accept_again_ns_ != 0 && now_ns() >= accept_again_ns_) accept_again_ns_ = 0;
  if (listening_ == may_accept()) return;
  listening_ = !listening_;
  change_events(listener_.get(), listening_ ? EPOLLIN : 0u);
}

void EventLoop::accept_all() {
  for (int i = 0; i < kAcceptsAtOnce && may_accept(); ++i) {
    Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    const int error = fd.valid() ? 0 : errno;
    if (error == EINTR || error == ECONNABORTED) continue;
    if (error == EAGAIN || error == EWOULDBLOCK) return;
    accept_error_.store(error);
    if (error != 0) {  // without a pause this would be a busy loop: the listener stays readable
      accept_again_ns_ = now_ns() + kAcceptPauseNs;
      return;
    }
    strangers_.emplace(fd.get(), now_ns());
    on_accept(std::move(fd));
  }
}

int64_t EventLoop::handshake_ns() const {
  return (strangers_.size() >= limits_.strangers ? limits_.crowded_ms : limits_.handshake_ms) * 1000000;
}

void EventLoop::drop_late_strangers() {
  if (strangers_.empty()) return;
  const int64_t too_old_ns = now_ns() - handshake_ns();
  for (auto it = strangers_.begin(); it != strangers_.end();) {
    const auto stranger = it++;
    if (stranger->second <= too_old_ns) on_late(stranger->first);
  }
}

int EventLoop::timeout_ms() const {
  int64_t next_ns = next_look_ns();
  if (accept_again_ns_ != 0) next_ns = std::min(next_ns, accept_again_ns_);
  for (const auto &stranger : strangers_) next_ns = std::min(next_ns, stranger.second + handshake_ns());
  if (next_ns == INT64_MAX) return -1;
  return static_cast<int>(std::clamp<int64_t>((next_ns - now_ns() + 999999) / 1000000, 0, 60000));
}

}  // namespace phx
