// The client of a TCP store. Each call takes a connection for itself, an idle one or a new one, so that threads which
// wait for keys do not delay each other, and a connection never has more than one pending request.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/wait.h"
#include "store/store.h"
#include "store/tcp_protocol.h"
#include "store/tcp_socket.h"

namespace phx::store {
namespace {

constexpr size_t kMaxIdle = 8;
constexpr int64_t kHandshakeMs = 5000;   // for one try; a server that hangs is tried again until the deadline
constexpr int64_t kReplyGraceMs = 1000;  // the server says "timeout" itself, and knows best: it gets this long to do so

// How one try to connect ended.
enum class Attempt { kConnected, kRetry, kRefused, kFinal };

class TcpClientStore final : public phx_store {
 public:
  TcpClientStore(const Endpoint &endpoint, std::string token) : endpoint_(endpoint), token_(std::move(token)) {}

  // The first connection: the server may start later than its clients.
  phx_status start(const char *operation, const Deadline &deadline);

  phx_status set(const char *key, const void *value, size_t size) override {
    return call("store_set", {Op::kSet, 0, key, value, size}, Deadline::after_ms(CallTimeout::ms()));
  }
  phx_status await(const char *operation, const char *key, std::string *value, const Deadline &deadline) override {
    Reply reply;
    PHX_TRY(call(operation, {value != nullptr ? Op::kGet : Op::kWait, 0, key}, deadline, &reply));
    if (value != nullptr) *value = std::move(reply.payload);
    return PHX_OK;
  }
  phx_status add(const char *key, int64_t delta, int64_t *result) override {
    Reply reply;
    PHX_TRY(call("store_add", {Op::kAdd, delta, key}, Deadline::after_ms(CallTimeout::ms()), &reply));
    *result = reply.number;
    return PHX_OK;
  }
  phx_status remove(const char *key) override {
    return call("store_remove", {Op::kRemove, 0, key}, Deadline::after_ms(CallTimeout::ms()));
  }
  std::string server() const override { return endpoint_.host; }

 private:
  // `reply` may be NULL.
  phx_status call(const char *operation, Request request, const Deadline &deadline, Reply *reply = nullptr);
  phx_status exchange(const char *operation, int fd, const Request &request, const Deadline &deadline, Reply *reply);
  phx_status broken(const char *operation, int outcome, const Deadline &deadline) const;
  phx_status fail_gone(const char *operation, const std::string &why) const;

  phx_status take(const char *operation, const Deadline &deadline, Fd *out);
  void give_back(Fd fd);
  phx_status open(const char *operation, const Deadline &deadline, bool first, Fd *out);
  Attempt try_open(const char *operation, const Deadline &deadline, Fd *out, std::string *why);
  Attempt shake_hands(const char *operation, int fd, const Deadline &deadline, std::string *why);
  Attempt check_server(const char *operation, const Nonce &server_id);

  const Endpoint endpoint_;
  const std::string token_;
  AcrossForks<std::mutex> mutex_;
  uint32_t opened_in_ = process_generation();  // the process that the idle connections belong to
  std::vector<Fd> idle_;
  std::optional<Nonce> server_id_;  // of the first server that was met
};

phx_status TcpClientStore::start(const char *operation, const Deadline &deadline) {
  Fd fd;
  PHX_TRY(open(operation, deadline, true, &fd));
  give_back(std::move(fd));
  return PHX_OK;
}

// ---- one call

phx_status TcpClientStore::call(const char *operation, Request request, const Deadline &deadline, Reply *reply) {
  // The library's own calls are not checked by the C functions, and the server would close on what is too long.
  PHX_TRY(check_key(operation, request.key.c_str()));
  PHX_TRY(check_value(operation, request.value, request.value_size));
  Fd fd;
  PHX_TRY(take(operation, deadline, &fd));
  const bool waits = request.op == Op::kGet || request.op == Op::kWait;
  if (waits) request.number = deadline.left_ms();
  const Deadline end = waits ? Deadline::after_ms(deadline.left_ms() + kReplyGraceMs) : deadline;
  Reply unused;
  if (reply == nullptr) reply = &unused;
  // After an error, what the connection holds is unknown, so it is closed.
  PHX_TRY(exchange(operation, fd.get(), request, end, reply));
  give_back(std::move(fd));
  if (reply->status == PHX_ERR_TIMEOUT) return fail_key_timeout(operation, request.key.c_str(), deadline);
  return reply->status == PHX_OK ? PHX_OK : fail_text(reply->status, operation, "%s", reply->payload.c_str());
}

phx_status TcpClientStore::exchange(const char *operation, int fd, const Request &request, const Deadline &deadline,
                                    Reply *reply) {
  const std::string head = encode_head(request);
  FrameSize size = 0;
  int outcome = send_all(fd, head.data(), head.size(), deadline);
  if (outcome == kDone) outcome = send_all(fd, request.value, request.value_size, deadline);
  if (outcome == kDone) outcome = receive_all(fd, &size, sizeof size, deadline);
  const char *wrong = size > kMaxReplyBytes ? "a reply of impossible size" : nullptr;
  if (outcome == kDone && wrong == nullptr) {
    std::string frame(size, '\0');
    outcome = receive_all(fd, &frame[0], size, deadline);
    if (outcome == kDone) wrong = decode(frame, reply);
  }
  if (outcome != kDone) return broken(operation, outcome, deadline);
  if (wrong == nullptr) return PHX_OK;
  return fail(PHX_ERR_INTERNAL, operation, "the store at %s sent %s; are both sides of one version of phalanx?",
              endpoint_.text().c_str(), wrong);
}

phx_status TcpClientStore::broken(const char *operation, int outcome, const Deadline &deadline) const {
  if (outcome != kTimedOut) return fail_gone(operation, transfer_text(outcome));
  return fail(PHX_ERR_TIMEOUT, operation,
              "%s: the store at %s did not answer; see whether the process that serves it is stopped or overloaded",
              timed_out(deadline.budget_ms()).c_str(), endpoint_.text().c_str());
}

phx_status TcpClientStore::fail_gone(const char *operation, const std::string &why) const {
  return fail(
      PHX_ERR_PEER_DEAD, operation,
      "the store at %s went away (%s); the process that serves it has ended or released it, and its keys are lost",
      endpoint_.text().c_str(), why.c_str());
}

// ---- connections

phx_status TcpClientStore::take(const char *operation, const Deadline &deadline, Fd *out) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // After a fork the parent goes on with these connections, and two must not share one.
    if (opened_in_ != process_generation()) {
      idle_.clear();
      opened_in_ = process_generation();
    }
    if (!idle_.empty()) {
      *out = std::move(idle_.back());
      idle_.pop_back();
      return PHX_OK;
    }
  }
  return open(operation, deadline, false, out);
}

void TcpClientStore::give_back(Fd fd) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (idle_.size() < kMaxIdle) idle_.push_back(std::move(fd));
}

// `first`: no server has been seen at the address yet, so a refusal means "not yet" and not "gone".
phx_status TcpClientStore::open(const char *operation, const Deadline &deadline, bool first, Fd *out) {
  Backoff backoff(2000, 100000);
  std::string why;
  const auto text = [&] {
    return std::string(operation) + ": still waiting for the store at " + endpoint_.text() +
           " (last: " + (why.empty() ? "no answer yet" : why) + ")";
  };
  const LongWait long_wait(WaitText(text), deadline);
  for (;;) {
    const Attempt attempt = try_open(operation, deadline, out, &why);
    if (attempt == Attempt::kConnected) return PHX_OK;
    if (attempt == Attempt::kFinal) return last_error().status;
    if (attempt == Attempt::kRefused && !first) return fail_gone(operation, why);
    if (deadline.passed())
      return fail(PHX_ERR_TIMEOUT, operation,
                  "%s: could not reach a store at %s (last: %s); see whether the rank that serves it is running, "
                  "and whether address and port are right",
                  timed_out(deadline.budget_ms()).c_str(), endpoint_.text().c_str(), why.c_str());
    backoff.pause(deadline);
  }
}

Attempt TcpClientStore::try_open(const char *operation, const Deadline &deadline, Fd *out, std::string *why) {
  const Deadline end = Deadline::after_ms(std::min(deadline.left_ms(), kHandshakeMs));
  Fd fd;
  const int outcome = connect_before(endpoint_, end, &fd);
  if (outcome == EMFILE || outcome == ENFILE || outcome == EACCES || outcome == EPERM) {
    fail_errno(outcome, operation, "could not make a connection to %s", endpoint_.text().c_str());
    return Attempt::kFinal;
  }
  if (outcome != kDone) {
    *why = transfer_text(outcome);
    return outcome == ECONNREFUSED ? Attempt::kRefused : Attempt::kRetry;
  }
  const Attempt attempt = shake_hands(operation, fd.get(), end, why);
  if (attempt == Attempt::kConnected) *out = std::move(fd);
  return attempt;
}

Attempt TcpClientStore::shake_hands(const char *operation, int fd, const Deadline &deadline, std::string *why) {
  Greeting greeting;
  int outcome = receive_all(fd, &greeting, sizeof greeting, deadline);
  if (outcome == kDone && greeting.magic != kProtocol) {
    fail(PHX_ERR_INVALID, operation, "the server at %s is not a store of this version of phalanx; check the port",
         endpoint_.text().c_str());
    return Attempt::kFinal;
  }
  Answer answer;
  if (make_nonce(operation, &answer.nonce) != PHX_OK) return Attempt::kFinal;
  Verdict verdict;
  if (outcome == kDone) {
    answer.proof = make_proof(Side::kClient, token_, greeting, answer.nonce);
    outcome = send_all(fd, &answer, sizeof answer, deadline);
  }
  if (outcome == kDone) outcome = receive_all(fd, &verdict, sizeof verdict, deadline);
  if (outcome != kDone) {
    *why = transfer_text(outcome);
    return Attempt::kRetry;  // a server with too many newcomers sends some away
  }
  const bool accepted = verdict.accepted == 1;
  const Digest expected = make_proof(Side::kServer, token_, greeting, answer.nonce);
  if (!accepted || !equal_in_constant_time(verdict.proof, expected)) {
    fail(PHX_ERR_PERMISSION, operation, "%s; give the token with which the store at %s is served",
         accepted ? "the server does not know this token, so it is not trusted" : "the server refused this token",
         endpoint_.text().c_str());
    return Attempt::kFinal;
  }
  return check_server(operation, greeting.server_id);
}

// A server that took the place of an earlier one has none of its keys: going on with it would be a silent loss.
Attempt TcpClientStore::check_server(const char *operation, const Nonce &server_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!server_id_) server_id_ = server_id;
  if (server_id == *server_id_) return Attempt::kConnected;
  fail(PHX_ERR_PEER_DEAD, operation,
       "the store at %s went away, and another one is served at its address; its keys are lost: connect again",
       endpoint_.text().c_str());
  return Attempt::kFinal;
}

}  // namespace

phx_status make_tcp_client(const char *operation, const char *address, uint16_t port, const void *token,
                           size_t token_size, int64_t timeout_ms, phx_store **out) {
  PHX_TRY(check_out(operation, out));
  PHX_TRY(check_token(operation, token, token_size));
  PHX_TRY(check_timeout(operation, &timeout_ms));
  if (port == 0)
    return fail(PHX_ERR_INVALID, operation, "the port is 0; give the one that phx_store_tcp_serve returned");
  Endpoint endpoint;
  PHX_TRY(parse_endpoint(operation, address, port, &endpoint));
  auto *store = new TcpClientStore(endpoint, std::string(static_cast<const char *>(token), token_size));
  const phx_status status = store->start(operation, Deadline::after_ms(timeout_ms));
  if (status == PHX_OK)
    *out = store;
  else
    store->release();
  return status;
}

}  // namespace phx::store
