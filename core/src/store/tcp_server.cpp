// The epoll loop of a TCP store: see the header.
#include "store/tcp_server.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "base/thread.h"

namespace phx::store {
namespace {

constexpr uint64_t kListenerId = 0, kWakeId = 1, kFirstId = 2;  // what epoll calls them
constexpr int kEventsAtOnce = 64;
constexpr int kAcceptsAtOnce = 32;                   // then those that are here already have their turn
constexpr int64_t kAcceptPauseNs = 100 * 1000000LL;  // after accept() failed for want of descriptors or memory

}  // namespace

// ---- from outside the thread

TcpServer::TcpServer(const Endpoint &endpoint, std::string token, const TcpLimits &limits)
    : endpoint_(endpoint), token_(std::move(token)), limits_(limits), next_id_(kFirstId) {}

phx_status TcpServer::start(const char *operation, const Endpoint &endpoint, std::string token, const TcpLimits &limits,
                            std::unique_ptr<TcpServer> *out) {
  std::unique_ptr<TcpServer> server(new TcpServer(endpoint, std::move(token), limits));
  phx_status status = server->prepare(operation);
  if (status == PHX_OK) status = server->launch(operation);
  if (status == PHX_OK) *out = std::move(server);
  return status;
}

phx_status TcpServer::prepare(const char *operation) {
  if (!make_nonce(&server_id_)) return fail_errno(errno, operation, "%s: the system gave no random bytes", operation);
  const phx_status status = listen_on(operation, &endpoint_, &listener_);
  if (status != PHX_OK) return status;
  epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !wake_.valid())
    return fail_errno(errno, operation, "%s: could not make epoll or eventfd", operation);
  for (const uint64_t id : {kListenerId, kWakeId}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = id;
    const int fd = id == kWakeId ? wake_.get() : listener_.get();
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
      return fail_errno(errno, operation, "%s: epoll took no descriptor", operation);
  }
  return PHX_OK;
}

phx_status TcpServer::launch(const char *operation) {
  try {
    thread_ = start_thread("phx-store", [this] { run(); });
  } catch (const std::system_error &error) {
    return fail_errno(error.code().value(), operation, "%s: could not start the server's thread", operation);
  }
  return PHX_OK;
}

TcpServer::~TcpServer() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_release);
  wake();
  thread_.join();
}

void TcpServer::wake() {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);  // it fails only when it is full, and then the thread is awake
}

// ---- the thread

void TcpServer::run() {
  while (!stopping_.load(std::memory_order_acquire)) {
    try {
      serve_events();
    } catch (const std::bad_alloc &) {
      // Nothing is lost: epoll reports again what was not dealt with.
      PHX_LOG(PHX_LOG_ERROR, "the store at %s is short of memory", endpoint_.text.c_str());
    }
  }
  while (!connections_.empty()) close_connection(connections_.begin()->first, "");
  shutdown(listener_.get(), SHUT_RDWR);
}

void TcpServer::serve_events() {
  epoll_event events[kEventsAtOnce];
  const int count = epoll_wait(epoll_.get(), events, kEventsAtOnce, poll_timeout_ms());
  bool newcomers = false;
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 == kListenerId) {
      newcomers = true;  // last, so that those who are answering their greeting make room first
    } else if (events[i].data.u64 == kWakeId) {
      uint64_t wakes;
      (void)!read(wake_.get(), &wakes, sizeof wakes);
    } else {
      on_event(events[i].data.u64, events[i].events);
    }
  }
  expire_handshakes();
  if (newcomers) accept_clients();
  answer_parked();
  watch_listener();
}

int TcpServer::poll_timeout_ms() const {
  int64_t next = INT64_MAX;
  if (accept_again_ns_ != 0) next = accept_again_ns_;
  for (const auto &entry : connections_) {
    const TcpConnection &connection = *entry.second;
    if (connection.is_parked()) next = std::min(next, connection.parked_until().at_ns());
    if (connection.in_handshake()) next = std::min(next, connection.born_ns() + handshake_ns());
  }
  if (next == INT64_MAX) return -1;
  const int64_t left_ms = (next - now_ns() + 999999) / 1000000;
  return static_cast<int>(std::clamp<int64_t>(left_ms, 0, 60000));
}

void TcpServer::on_event(uint64_t id, uint32_t events) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;  // closed by an earlier event of the same batch
  const uint32_t wanted = found->second->watched_events;
  // A client that is gone need not be answered. While it is being read, the end comes after its last bytes.
  const bool gone = (events & (EPOLLERR | EPOLLHUP)) != 0 || ((events & EPOLLRDHUP) != 0 && (wanted & EPOLLIN) == 0);
  if (gone) return close_connection(id, "");
  advance(id, [&](TcpConnection &connection, const char **why) {
    if ((events & EPOLLOUT) != 0 && !connection.on_writable(why)) return false;
    return (events & EPOLLIN) == 0 || connection.on_readable(token_, table_, why);
  });
}

// Lets a connection do something, and closes it when that fails. Running out of memory costs one client, not the
// server.
template <class Step>
void TcpServer::advance(uint64_t id, Step &&step) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  TcpConnection &connection = *found->second;
  const bool was_in_handshake = connection.in_handshake();
  const char *why = "";
  bool open = false;
  try {
    open = step(connection, &why);
  } catch (const std::bad_alloc &) {
    why = "out of memory";
  }
  if (was_in_handshake && !connection.in_handshake()) --handshakes_;
  if (open)
    watch(id, connection);
  else
    close_connection(id, why);
}

void TcpServer::accept_clients() {
  for (int i = 0; i < kAcceptsAtOnce && may_accept(); ++i) {
    Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      // Not waiting a moment would make a busy loop: the listener stays readable.
      if (errno != EAGAIN && errno != EWOULDBLOCK) accept_again_ns_ = now_ns() + kAcceptPauseNs;
      return;
    }
    tune_connection(fd.get());
    Nonce nonce;
    if (!make_nonce(&nonce)) return;
    const int number = fd.get();
    const uint64_t id = next_id_;
    try {
      connections_.emplace(id, std::make_unique<TcpConnection>(std::move(fd), nonce, server_id_));
    } catch (const std::bad_alloc &) {
      continue;
    }
    ++next_id_;
    ++handshakes_;
    epoll_event event{};
    event.data.u64 = id;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, number, &event) != 0) {
      close_connection(id, "epoll took no more descriptors");
      continue;
    }
    advance(id, [](TcpConnection &connection, const char **why) { return connection.on_writable(why); });
  }
}

bool TcpServer::may_accept() const {
  return handshakes_ < limits_.handshakes && connections_.size() < limits_.connections && accept_again_ns_ == 0;
}

void TcpServer::watch_listener() {
  if (accept_again_ns_ != 0 && now_ns() >= accept_again_ns_) accept_again_ns_ = 0;
  if (listening_ == may_accept()) return;
  listening_ = !listening_;
  epoll_event event{};
  event.events = listening_ ? EPOLLIN : 0u;
  event.data.u64 = kListenerId;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), &event);
}

// Few are ever parked (one per waiting thread of a client), so all are tried whenever any key was set.
void TcpServer::answer_parked() {
  const uint64_t version = table_.version();
  const bool changed = version != answered_version_;
  std::vector<uint64_t> due;
  for (const auto &entry : connections_)
    if (entry.second->is_parked() && (changed || entry.second->parked_until().passed())) due.push_back(entry.first);
  answered_version_ = version;
  for (const uint64_t id : due)
    advance(id, [this](TcpConnection &connection, const char **why) { return connection.try_parked(table_, why); });
}

int64_t TcpServer::handshake_ns() const {
  return (handshakes_ >= limits_.handshakes ? limits_.crowded_ms : limits_.handshake_ms) * 1000000;
}

void TcpServer::expire_handshakes() {
  if (handshakes_ == 0) return;
  const int64_t too_old = now_ns() - handshake_ns();
  std::vector<uint64_t> due;
  for (const auto &entry : connections_)
    if (entry.second->in_handshake() && entry.second->born_ns() <= too_old) due.push_back(entry.first);
  for (const uint64_t id : due) close_connection(id, "it did not show the token in time");
}

void TcpServer::watch(uint64_t id, TcpConnection &connection) {
  const uint32_t wanted = connection.wanted_events();
  if (wanted == connection.watched_events) return;
  connection.watched_events = wanted;
  epoll_event event{};
  event.events = wanted;
  event.data.u64 = id;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.fd(), &event);
}

void TcpServer::close_connection(uint64_t id, const char *why) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  if (*why != '\0') PHX_LOG(PHX_LOG_WARNING, "the store at %s closed a connection: %s", endpoint_.text.c_str(), why);
  if (found->second->in_handshake()) --handshakes_;
  // Closing alone would not end it while a forked child holds a copy of the descriptor.
  shutdown(found->second->fd(), SHUT_RDWR);
  connections_.erase(found);
}

}  // namespace phx::store
