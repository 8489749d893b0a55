// The server's side of one connection: see the header.
#include "store/tcp_connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "store/semantics.h"

namespace phx::store {
namespace {

constexpr size_t kReadBytes =
    size_t{64} << 10;             // at once; memory grows with the bytes that came, not with the announced size
constexpr int kReadsAtOnce = 16;  // then the other connections have their turn
constexpr size_t kKeptBytes = size_t{64} << 10;  // of a buffer from one frame to the next

const char *operation_name(Op op) {
  switch (op) {
    case Op::kSet: return "store_set";
    case Op::kGet: return "store_get";
    case Op::kWait: return "store_wait";
    case Op::kAdd: return "store_add";
    case Op::kRemove: return "store_remove";
  }
  return "store";
}

void empty(std::string *buffer) {
  buffer->clear();
  if (buffer->capacity() > kKeptBytes) std::string().swap(*buffer);
}

}  // namespace

TcpConnection::TcpConnection(Fd fd, const Nonce &nonce, const Nonce &server_id)
    : fd_(std::move(fd)), greeting_{nonce, server_id}, parked_until_(Deadline::after_ms(0)) {
  out_ = encode(greeting_);
}

uint32_t TcpConnection::wanted_events() const {
  uint32_t events = EPOLLRDHUP;  // a client that goes away while it is parked is noticed
  if (sent_ < out_.size())
    events |= EPOLLOUT;
  else if (state_ != State::kParked)
    events |= EPOLLIN;
  return events;
}

bool TcpConnection::on_readable(const std::string &token, Table &table, const char **why) {
  *why = "";
  if (sent_ < out_.size() || state_ == State::kParked) return true;
  if (state_ == State::kHandshake) {
    if (!read_some(kAnswerBytes, why)) return false;
    return in_.size() < kAnswerBytes || on_answer(token, why);
  }
  if (in_.size() < kFrameSizeBytes) {
    if (!read_some(kFrameSizeBytes, why)) return false;
    if (in_.size() < kFrameSizeBytes) return true;
  }
  const size_t size = decode_size(in_.data());
  if (size < kRequestHeaderBytes || size > kMaxRequestBytes) {
    *why = "a frame of impossible size";
    return false;
  }
  if (!read_some(kFrameSizeBytes + size, why)) return false;
  return in_.size() < kFrameSizeBytes + size || on_request(table, why);
}

bool TcpConnection::read_some(size_t wanted, const char **why) {
  for (int i = 0; i < kReadsAtOnce && in_.size() < wanted; ++i) {
    const size_t before = in_.size();
    in_.resize(std::min(wanted, before + kReadBytes));
    const ssize_t got = recv(fd_.get(), &in_[before], in_.size() - before, 0);
    const int error = errno;
    in_.resize(before + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got < 0 && error == EINTR) continue;
    if (got < 0 && (error == EAGAIN || error == EWOULDBLOCK)) return true;
    if (got <= 0) {
      *why = before == 0 ? "" : "the connection ended inside a frame";
      return false;
    }
  }
  return true;
}

bool TcpConnection::on_answer(const std::string &token, const char **why) {
  const Answer answer = decode_answer(in_);
  empty(&in_);
  Verdict verdict{};
  verdict.accepted = equal_in_constant_time(answer.proof, make_proof(Side::kClient, token, greeting_, answer.nonce));
  if (verdict.accepted) verdict.proof = make_proof(Side::kServer, token, greeting_, answer.nonce);
  state_ = verdict.accepted ? State::kReady : State::kClosing;
  out_ = encode(verdict);
  sent_ = 0;
  if (!flush(why)) return false;
  if (!verdict.accepted) *why = "a wrong token";
  return verdict.accepted;
}

bool TcpConnection::on_request(Table &table, const char **why) {
  in_.erase(0, kFrameSizeBytes);
  Request request;
  const char *wrong = decode(in_, &request);
  if (wrong != nullptr) {
    *why = wrong;
    return false;
  }
  if (request.op == Op::kGet || request.op == Op::kWait) {
    parked_ = std::move(request);
    parked_until_ = Deadline::after_ms(parked_.number);
    state_ = State::kParked;
    empty(&in_);
    return try_parked(table, why);
  }
  const Reply reply = execute(request, table);
  empty(&in_);  // not before: the request's value lies in it
  return reply_with(reply, why);
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

bool TcpConnection::try_parked(Table &table, const char **why) {
  *why = "";
  Reply reply;
  if (!table.find(parked_.key, parked_.op == Op::kGet ? &reply.payload : nullptr)) {
    if (!parked_until_.passed()) return true;
    reply.status = fail_key_timeout(operation_name(parked_.op), parked_.key.c_str(), parked_until_);
    reply.payload = last_error().text;
  }
  state_ = State::kReady;
  parked_ = Request();
  return reply_with(reply, why);
}

bool TcpConnection::reply_with(const Reply &reply, const char **why) {
  out_ = encode(reply);
  sent_ = 0;
  return flush(why);
}

bool TcpConnection::flush(const char **why) {
  *why = "";
  while (sent_ < out_.size()) {
    const ssize_t sent = send(fd_.get(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (sent < 0) return false;
    sent_ += static_cast<size_t>(sent);
  }
  empty(&out_);
  sent_ = 0;
  return true;
}

}  // namespace phx::store
