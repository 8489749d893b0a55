// The epoll loop of a TCP store: see the header.
#include "store/tcp_server.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <vector>

#include "base/error.h"

namespace phx::store {

TcpServer::TcpServer(const Endpoint &endpoint, std::string token, const TcpLimits &limits)
    : endpoint_(endpoint), token_(std::move(token)), limits_(limits) {}

phx_status TcpServer::start(const char *operation, const Endpoint &endpoint, std::string token, const TcpLimits &limits,
                            std::unique_ptr<TcpServer> *out) {
  std::unique_ptr<TcpServer> server(new TcpServer(endpoint, std::move(token), limits));
  PHX_TRY(make_nonce(operation, &server->server_id_));
  Fd listener;
  phx_status status = listen_on(operation, &server->endpoint_, &listener);
  if (status == PHX_OK)
    status = server->EventLoop::start(operation, "phx-store", std::move(listener),
                                      {limits.handshakes, limits.handshake_ms, limits.crowded_ms});
  if (status == PHX_OK) *out = std::move(server);
  return status;
}

TcpServer::~TcpServer() {
  stop();
  while (!connections_.empty()) close_connection(connections_.begin()->first, "");
}

// ---- the thread

bool TcpServer::goes_on_after(const std::exception &error) {
  PHX_LOG(PHX_LOG_ERROR, "the store at %s goes on after an error: %s", endpoint_.text.c_str(), error.what());
  return true;
}

int64_t TcpServer::next_look_ns() const {
  int64_t next = INT64_MAX;
  for (const auto &entry : connections_)
    if (entry.second->is_parked()) next = std::min(next, entry.second->parked_until().at_ns());
  return next;
}

void TcpServer::on_event(int fd, uint32_t events) {
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;  // closed by an earlier event of the same batch
  const uint32_t wanted = found->second->watched_events;
  // A client that is gone need not be answered. While it is being read, the end comes after its last bytes.
  const bool gone = (events & (EPOLLERR | EPOLLHUP)) != 0 || ((events & EPOLLRDHUP) != 0 && (wanted & EPOLLIN) == 0);
  if (gone) return close_connection(fd, "");
  advance(fd, [&](TcpConnection &connection, const char **why) {
    if ((events & EPOLLOUT) != 0 && !connection.on_writable(why)) return false;
    return (events & EPOLLIN) == 0 || connection.on_readable(token_, table_, why);
  });
}

// Lets a connection do something, and closes it when that fails. Running out of memory costs one client, not the
// server.
template <class Step>
void TcpServer::advance(int fd, Step &&step) {
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;
  TcpConnection &connection = *found->second;
  const char *why = "";
  bool open = false;
  try {
    open = step(connection, &why);
  } catch (const std::bad_alloc &) {
    why = "out of memory";
  }
  if (!connection.in_handshake()) end_handshake(fd);
  const uint32_t wanted = connection.wanted_events();
  if (open && wanted != connection.watched_events) {
    open = connection.watched_events == 0 ? watch_fd(fd, wanted) : change_events(fd, wanted);
    connection.watched_events = wanted;
    if (!open) why = "epoll took no more descriptors";
  }
  if (!open) close_connection(fd, why);
}

void TcpServer::on_accept(Fd fd, size_t) {
  const int number = fd.get();
  tune_connection(number);
  Nonce nonce;
  if (make_nonce("store_tcp_serve", &nonce) != PHX_OK) return end_handshake(number);
  try {
    connections_.emplace(number, std::make_unique<TcpConnection>(std::move(fd), nonce, server_id_));
  } catch (const std::bad_alloc &) {
    return end_handshake(number);
  }
  advance(number, [](TcpConnection &connection, const char **why) { return connection.on_writable(why); });
}

// Few are ever parked (one per waiting thread of a client), so all are tried whenever any key was set.
void TcpServer::answer_parked() {
  const uint64_t version = table_.version();
  const bool changed = version != answered_version_;
  std::vector<int> due;
  for (const auto &entry : connections_)
    if (entry.second->is_parked() && (changed || entry.second->parked_until().passed())) due.push_back(entry.first);
  answered_version_ = version;
  for (const int fd : due)
    advance(fd, [this](TcpConnection &connection, const char **why) { return connection.try_parked(table_, why); });
}

void TcpServer::close_connection(int fd, const char *why) {
  end_handshake(fd);
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;
  if (*why != '\0') PHX_LOG(PHX_LOG_WARNING, "the store at %s closed a connection: %s", endpoint_.text.c_str(), why);
  // Closing alone would end neither the connection nor its events while a forked child holds a copy of the descriptor.
  shutdown(fd, SHUT_RDWR);
  unwatch_fd(fd);
  connections_.erase(found);
}

}  // namespace phx::store
