// The epoll loop of a TCP store, and its clients: see the header.
#include "store/tcp_server.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <vector>

#include "base/error.h"

namespace phx::store {
namespace {

// At once: memory grows with the bytes that came, not with the announced size.
constexpr size_t kReadBytes = size_t{64} << 10;
constexpr int kReadsAtOnce = 16;                 // then the other connections have their turn
constexpr size_t kKeptBytes = size_t{64} << 10;  // of a buffer from one frame to the next

void empty(std::string *buffer) {
  buffer->clear();
  if (buffer->capacity() > kKeptBytes) std::string().swap(*buffer);
}

}  // namespace

// ---- one client

TcpConnection::TcpConnection(Fd fd, const Nonce &nonce, const Nonce &server_id)
    : fd_(std::move(fd)), greeting_{kProtocol, nonce, server_id}, parked_until_(Deadline::after_ms(0)) {
  out_ = bytes_of(greeting_);
}

uint32_t TcpConnection::wanted_events() const {
  uint32_t events = EPOLLRDHUP;  // a client that goes away while it is parked is noticed
  if (sent_ < out_.size())
    events |= EPOLLOUT;
  else if (state_ != State::kParked)
    events |= EPOLLIN;
  return events;
}

const char *TcpConnection::on_readable(const std::string &token, Table &table) {
  if (sent_ < out_.size() || state_ == State::kParked) return nullptr;
  if (state_ == State::kHandshake) {
    const char *const why = read_some(sizeof(Answer));
    return why != nullptr || in_.size() < sizeof(Answer) ? why : on_answer(token);
  }
  if (in_.size() < sizeof(FrameSize)) {
    const char *const why = read_some(sizeof(FrameSize));
    if (why != nullptr || in_.size() < sizeof(FrameSize)) return why;
  }
  const size_t size = decode<FrameSize>(in_);
  if (size < sizeof(RequestHead) || size > kMaxRequestBytes) return "a frame of impossible size";
  const char *const why = read_some(sizeof(FrameSize) + size);
  return why != nullptr || in_.size() < sizeof(FrameSize) + size ? why : on_request(table);
}

const char *TcpConnection::read_some(size_t wanted) {
  for (int i = 0; i < kReadsAtOnce && in_.size() < wanted; ++i) {
    const size_t before = in_.size();
    in_.resize(std::min(wanted, before + kReadBytes));
    const ssize_t got = recv(fd_.get(), &in_[before], in_.size() - before, 0);
    const int error = errno;
    in_.resize(before + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got < 0 && error == EINTR) continue;
    if (got < 0 && (error == EAGAIN || error == EWOULDBLOCK)) return nullptr;
    if (got <= 0) return before == 0 ? "" : "the connection ended inside a frame";
  }
  return nullptr;
}

const char *TcpConnection::on_answer(const std::string &token) {
  const auto answer = decode<Answer>(in_);
  empty(&in_);
  state_ = State::kReady;
  if (!equal_in_constant_time(answer.proof, make_proof(Side::kClient, token, greeting_, answer.nonce))) {
    const char *const why = send_out(bytes_of(Verdict{}));
    return why != nullptr ? why : "a wrong token";
  }
  return send_out(bytes_of(Verdict{1, make_proof(Side::kServer, token, greeting_, answer.nonce)}));
}

const char *TcpConnection::on_request(Table &table) {
  in_.erase(0, sizeof(FrameSize));
  Request request;
  const char *const wrong = decode(in_, &request);
  if (wrong != nullptr) return wrong;
  if (request.op == Op::kGet || request.op == Op::kWait) {
    parked_ = std::move(request);
    parked_until_ = Deadline::after_ms(parked_.number);
    state_ = State::kParked;
    empty(&in_);
    return try_parked(table);
  }
  const Reply reply = execute(request, table);
  empty(&in_);  // not before: the request's value lies in it
  return send_out(encode(reply));
}

// The table records its errors as those of this thread; the client gets their text.
Reply TcpConnection::execute(const Request &request, Table &table) {
  Reply reply;
  if (request.op == Op::kSet) table.set(request.key.c_str(), request.value, request.value_size);
  if (request.op == Op::kAdd) reply.status = table.add(request.key.c_str(), request.number, &reply.number);
  if (request.op == Op::kRemove) reply.status = table.remove(request.key.c_str());
  if (reply.status != PHX_OK) reply.payload = last_error().text;
  return reply;
}

const char *TcpConnection::try_parked(Table &table) {
  Reply reply;
  if (!table.find(parked_.key, parked_.op == Op::kGet ? &reply.payload : nullptr)) {
    if (!parked_until_.passed()) return nullptr;
    reply.status = PHX_ERR_TIMEOUT;  // the client knows its key and its timeout, and makes the text
  }
  state_ = State::kReady;
  parked_ = Request();
  return send_out(encode(reply));
}

const char *TcpConnection::send_out(std::string bytes) {
  out_ = std::move(bytes);
  sent_ = 0;
  return flush();
}

const char *TcpConnection::flush() {
  while (sent_ < out_.size()) {
    const ssize_t sent = send(fd_.get(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return nullptr;
    if (sent < 0) return "";
    sent_ += static_cast<size_t>(sent);
  }
  empty(&out_);
  sent_ = 0;
  return nullptr;
}

// ---- the server

phx_status TcpServer::start(const char *operation, const Endpoint &endpoint, std::string token, const TcpLimits &limits,
                            std::unique_ptr<TcpServer> *out) {
  std::unique_ptr<TcpServer> server(new TcpServer(endpoint, std::move(token), limits));
  PHX_TRY(make_nonce(operation, &server->server_id_));
  Fd listener;
  PHX_TRY(listen_on(operation, &server->endpoint_, &listener));
  PHX_TRY(server->EventLoop::start(operation, "phx-store", std::move(listener),
                                   {limits.handshakes, limits.handshake_ms, limits.crowded_ms}));
  *out = std::move(server);
  return PHX_OK;
}

TcpServer::~TcpServer() {
  stop();
  while (!connections_.empty()) close_connection(connections_.begin()->first, "");
}

// ---- its thread

bool TcpServer::goes_on_after(const std::exception &error) {
  PHX_LOG(PHX_LOG_ERROR, "the store at %s goes on after an error: %s", endpoint_.text().c_str(), error.what());
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
  advance(fd, [&](TcpConnection &connection) {
    const char *const why = (events & EPOLLOUT) != 0 ? connection.on_writable() : nullptr;
    return why != nullptr || (events & EPOLLIN) == 0 ? why : connection.on_readable(token_, table_);
  });
}

// Lets a connection do something, and closes it when that fails. Running out of memory costs one client, not the
// server.
template <class Step>
void TcpServer::advance(int fd, Step &&step) {
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;
  TcpConnection &connection = *found->second;
  const char *why = nullptr;
  try {
    why = step(connection);
  } catch (const std::bad_alloc &) {
    why = "out of memory";
  }
  if (!connection.in_handshake()) end_handshake(fd);
  const uint32_t wanted = connection.wanted_events();
  if (why == nullptr && wanted != connection.watched_events) {
    const bool watched = connection.watched_events == 0 ? watch_fd(fd, wanted) : change_events(fd, wanted);
    connection.watched_events = wanted;
    if (!watched) why = "epoll took no more descriptors";
  }
  if (why != nullptr) close_connection(fd, why);
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
  advance(number, [](TcpConnection &connection) { return connection.on_writable(); });
}

// Few are ever parked (one per waiting thread of a client), so all are tried whenever any key was set.
void TcpServer::answer_parked() {
  const uint64_t version = table_.version();
  const bool changed = version != answered_version_;
  std::vector<int> due;
  for (const auto &entry : connections_)
    if (entry.second->is_parked() && (changed || entry.second->parked_until().passed())) due.push_back(entry.first);
  answered_version_ = version;
  for (const int fd : due) advance(fd, [this](TcpConnection &connection) { return connection.try_parked(table_); });
}

void TcpServer::close_connection(int fd, const char *why) {
  end_handshake(fd);
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;
  if (*why != '\0') PHX_LOG(PHX_LOG_WARNING, "the store at %s closed a connection: %s", endpoint_.text().c_str(), why);
  // Closing alone would end neither the connection nor its events while a forked child holds a copy of the descriptor.
  shutdown(fd, SHUT_RDWR);
  unwatch_fd(fd);
  connections_.erase(found);
}

}  // namespace phx::store
