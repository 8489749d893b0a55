// The client of a TCP store. Each call takes a connection for itself, an idle one or a new one, so that threads which
// wait for keys do not delay each other, and a connection never has more than one pending request.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "base/long_wait.h"
#include "base/wait.h"
#include "store/semantics.h"
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
    Request request = make_request(Op::kSet, key, 0);
    request.value = value;
    request.value_size = size;
    Reply reply;
    return call("store_set", request, Deadline::after_ms(CallTimeout::ms()), &reply);
  }
  phx_status get(const char *key, std::string *value, int64_t timeout_ms) override {
    Request request = make_request(Op::kGet, key, timeout_ms);
    Reply reply;
    const phx_status status = call("store_get", request, Deadline::after_ms(timeout_ms), &reply);
    if (status == PHX_OK) *value = std::move(reply.payload);
    return status;
  }
  phx_status wait(const char *const *keys, size_t count, int64_t timeout_ms) override {
    const Deadline deadline = Deadline::after_ms(timeout_ms);
    return wait_for_each(keys, count, [&](const char *key) {
      Request request = make_request(Op::kWait, key, timeout_ms);
      Reply reply;
      return call("store_wait", request, deadline, &reply);
    });
  }
  phx_status add(const char *key, int64_t delta, int64_t *result) override {
    Request request = make_request(Op::kAdd, key, delta);
    Reply reply;
    const phx_status status = call("store_add", request, Deadline::after_ms(CallTimeout::ms()), &reply);
    if (status == PHX_OK) *result = reply.number;
    return status;
  }
  phx_status remove(const char *key) override {
    Request request = make_request(Op::kRemove, key, 0);
    Reply reply;
    return call("store_remove", request, Deadline::after_ms(CallTimeout::ms()), &reply);
  }
  std::string server() const override { return endpoint_.host(); }

 private:
  static Request make_request(Op op, const char *key, int64_t number) {
    Request request;
    request.op = op;
    request.key = key;
    request.number = number;
    return request;
  }

  phx_status call(const char *operation, Request &request, const Deadline &deadline, Reply *reply);
  phx_status exchange(const char *operation, int fd, const Request &request, const Deadline &deadline, Reply *reply);
  phx_status broken(const char *operation, Transfer how, int error, const Deadline &deadline) const;

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
  bool met_ = false;  // whether server_id_ is known
  Nonce server_id_{};
};

phx_status TcpClientStore::start(const char *operation, const Deadline &deadline) {
  Fd fd;
  const phx_status status = open(operation, deadline, true, &fd);
  if (status == PHX_OK) give_back(std::move(fd));
  return status;
}

// ---- one call

phx_status TcpClientStore::call(const char *operation, Request &request, const Deadline &deadline, Reply *reply) {
  // The library's own calls are not checked by the C functions, and the server would close on what is too long.
  phx_status status = check_key(operation, request.key.c_str());
  if (status == PHX_OK) status = check_value(operation, request.value, request.value_size);
  Fd fd;
  if (status == PHX_OK) status = take(operation, deadline, &fd);
  if (status != PHX_OK) return status;
  const bool waits = request.op == Op::kGet || request.op == Op::kWait;
  if (waits) request.number = deadline.left_ms();
  const Deadline end = waits ? Deadline::after_ms(deadline.left_ms() + kReplyGraceMs) : deadline;
  status = exchange(operation, fd.get(), request, end, reply);
  if (status != PHX_OK) return status;  // what the connection holds now is unknown, so it is closed
  give_back(std::move(fd));
  if (reply->status == PHX_ERR_TIMEOUT) return fail_key_timeout(operation, request.key.c_str(), deadline);
  return reply->status == PHX_OK ? PHX_OK : fail_text(reply->status, operation, "%s", reply->payload.c_str());
}

phx_status TcpClientStore::exchange(const char *operation, int fd, const Request &request, const Deadline &deadline,
                                    Reply *reply) {
  int error = 0;
  const std::string head = encode_head(request);
  Transfer how = send_all(fd, head.data(), head.size(), deadline, &error);
  if (how == Transfer::kDone) how = send_all(fd, request.value, request.value_size, deadline, &error);
  char size_bytes[kFrameSizeBytes];
  if (how == Transfer::kDone) how = receive_all(fd, size_bytes, sizeof size_bytes, deadline, &error);
  if (how != Transfer::kDone) return broken(operation, how, error, deadline);
  const size_t size = decode_size(size_bytes);
  const char *wrong = size > kMaxReplyBytes ? "a reply of impossible size" : nullptr;
  if (wrong == nullptr) {
    std::string frame(size, '\0');
    how = receive_all(fd, &frame[0], size, deadline, &error);
    if (how != Transfer::kDone) return broken(operation, how, error, deadline);
    wrong = decode(frame, reply);
  }
  if (wrong == nullptr) return PHX_OK;
  return fail(PHX_ERR_INTERNAL, operation, "the store at %s sent %s; are both sides of one version of phalanx?",
              endpoint_.text.c_str(), wrong);
}

phx_status TcpClientStore::broken(const char *operation, Transfer how, int error, const Deadline &deadline) const {
  if (how == Transfer::kTimedOut)
    return fail(PHX_ERR_TIMEOUT, operation,
                "%s: the store at %s did not answer; see whether the process that serves it is stopped or overloaded",
                timed_out(deadline.budget_ms()).c_str(), endpoint_.text.c_str());
  return fail(
      PHX_ERR_PEER_DEAD, operation,
      "the store at %s went away (%s); the process that serves it has ended or released it, and its keys are lost",
      endpoint_.text.c_str(), transfer_text(how, error).c_str());
}

// ---- connections

phx_status TcpClientStore::take(const char *operation, const Deadline &deadline, Fd *out) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (opened_in_ !=
        process_generation()) {  // after a fork: the parent goes on with these connections, and two must not share one
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
    return std::string(operation) + ": still waiting for the store at " + endpoint_.text +
           " (last: " + (why.empty() ? "no answer yet" : why) + ")";
  };
  const LongWait long_wait(WaitText(text), deadline);
  for (;;) {
    const Attempt attempt = try_open(operation, deadline, out, &why);
    if (attempt == Attempt::kConnected) return PHX_OK;
    if (attempt == Attempt::kFinal) return last_error().status;
    if (attempt == Attempt::kRefused && !first)
      return fail(PHX_ERR_PEER_DEAD, operation,
                  "the store at %s went away (%s); the process that serves it has ended or released it, and its keys "
                  "are lost",
                  endpoint_.text.c_str(), why.c_str());
    if (deadline.passed())
      return fail(PHX_ERR_TIMEOUT, operation,
                  "%s: could not reach a store at %s (last: %s); see whether the rank that serves it is running, "
                  "and whether address and port are right",
                  timed_out(deadline.budget_ms()).c_str(), endpoint_.text.c_str(), why.c_str());
    backoff.pause(deadline);
  }
}

Attempt TcpClientStore::try_open(const char *operation, const Deadline &deadline, Fd *out, std::string *why) {
  const Deadline end = Deadline::after_ms(std::min(deadline.left_ms(), kHandshakeMs));
  int error = 0;
  Fd fd;
  const Transfer how = connect_before(endpoint_, end, &fd, &error);
  if (how != Transfer::kDone) {
    *why = transfer_text(how, error);
    if (how == Transfer::kFailed && (error == EMFILE || error == ENFILE || error == EACCES || error == EPERM)) {
      fail_errno(error, operation, "could not make a connection to %s", endpoint_.text.c_str());
      return Attempt::kFinal;
    }
    return error == ECONNREFUSED ? Attempt::kRefused : Attempt::kRetry;
  }
  const Attempt attempt = shake_hands(operation, fd.get(), end, why);
  if (attempt == Attempt::kConnected) *out = std::move(fd);
  return attempt;
}

Attempt TcpClientStore::shake_hands(const char *operation, int fd, const Deadline &deadline, std::string *why) {
  int error = 0;
  std::string bytes(kGreetingBytes, '\0');
  Transfer how = receive_all(fd, &bytes[0], bytes.size(), deadline, &error);
  Greeting greeting;
  if (how == Transfer::kDone && !decode(bytes, &greeting)) {
    fail(PHX_ERR_INVALID, operation, "the server at %s is not a store of this version of phalanx; check the port",
         endpoint_.text.c_str());
    return Attempt::kFinal;
  }
  Answer answer;
  if (make_nonce(operation, &answer.nonce) != PHX_OK) return Attempt::kFinal;
  if (how == Transfer::kDone) {
    answer.proof = make_proof(Side::kClient, token_, greeting, answer.nonce);
    bytes = encode(answer);
    how = send_all(fd, bytes.data(), bytes.size(), deadline, &error);
    bytes.assign(kVerdictBytes, '\0');
    if (how == Transfer::kDone) how = receive_all(fd, &bytes[0], bytes.size(), deadline, &error);
  }
  if (how != Transfer::kDone) {
    *why = transfer_text(how, error);
    return Attempt::kRetry;  // a server with too many newcomers sends some away
  }
  const Verdict verdict = decode_verdict(bytes);
  const Digest expected = make_proof(Side::kServer, token_, greeting, answer.nonce);
  if (!verdict.accepted || !equal_in_constant_time(verdict.proof, expected)) {
    fail(PHX_ERR_PERMISSION, operation, "%s; give the token with which the store at %s is served",
         verdict.accepted ? "the server does not know this token, so it is not trusted"
                          : "the server refused this token",
         endpoint_.text.c_str());
    return Attempt::kFinal;
  }
  return check_server(operation, greeting.server_id);
}

// A server that took the place of an earlier one has none of its keys: going on with it would be a silent loss.
Attempt TcpClientStore::check_server(const char *operation, const Nonce &server_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!met_) server_id_ = server_id;
  met_ = true;
  if (server_id == server_id_) return Attempt::kConnected;
  fail(PHX_ERR_PEER_DEAD, operation,
       "the store at %s went away, and another one is served at its address; its keys are lost: connect again",
       endpoint_.text.c_str());
  return Attempt::kFinal;
}

}  // namespace

phx_status make_tcp_client(const char *operation, const char *address, uint16_t port, const void *token,
                           size_t token_size, int64_t timeout_ms, phx_store **out) {
  phx_status status = check_out(operation, out);
  if (status == PHX_OK) status = check_token(operation, token, token_size);
  if (status == PHX_OK) status = check_timeout(operation, &timeout_ms);
  if (status == PHX_OK && port == 0)
    status = fail(PHX_ERR_INVALID, operation, "the port is 0; give the one that phx_store_tcp_serve returned");
  Endpoint endpoint;
  if (status == PHX_OK) status = parse_endpoint(operation, address, port, &endpoint);
  if (status != PHX_OK) return status;
  auto *store = new TcpClientStore(endpoint, std::string(static_cast<const char *>(token), token_size));
  status = store->start(operation, Deadline::after_ms(timeout_ms));
  if (status == PHX_OK)
    *out = store;
  else
    store->release();
  return status;
}

}  // namespace phx::store
