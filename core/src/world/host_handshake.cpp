#include "world/host_handshake.h"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/deadline.h"
#include "base/entropy.h"

namespace phx {
namespace {

// A listener with too many strangers closes some, and a connection may be cut: then the dialer tries again.
constexpr int kMostLosses = 8;
constexpr int64_t kFirstPauseMs = 20, kLongestPauseMs = 2000;
constexpr int64_t kFullPauseMs = 1;                 // while the queue of a rank of this host is full
constexpr int64_t kEndingMs = 50, kEndPauseMs = 5;  // see Dial::await_end
constexpr const char *kCreate = "group_create";

// Reads no more than what is missing of a record of that size. kMessage: *record has all of it, and *input nothing.
Receive receive_rest(int socket, std::string *input, void *record, size_t size, int *error) {
  while (input->size() < size) {
    char buffer[256];
    const ssize_t got = recv(socket, buffer, std::min(sizeof buffer, size - input->size()), MSG_DONTWAIT);
    *error = got < 0 ? errno : 0;
    if (got < 0 && *error == EINTR) continue;
    if (got < 0 && *error == EAGAIN) return Receive::kNothing;
    if (got <= 0) return Receive::kClosed;
    input->append(buffer, static_cast<size_t>(got));
  }
  std::memcpy(record, input->data(), size);
  input->clear();
  return Receive::kMessage;
}

}  // namespace

store::Digest make_host_proof(HostSide side, const Uuid &token, const HostHello &hello, const uint8_t (&nonce)[16]) {
  // The sides differ, so that one side's proof cannot be used as the other's. Both words have equal length.
  using store::bytes_of;
  return store::hmac_sha256(
      bytes_of(token), (side == HostSide::kListener ? "listens " : "dials   ") + bytes_of(hello) + bytes_of(nonce));
}

// ---- the side that listens

Stranger::Step Stranger::take_hello() {
  Hello hello{};
  const Receive got = receive_record(socket_.get(), &hello, sizeof hello);
  if (got == Receive::kNothing) return Step::kWaits;
  hello_.from = hello.from;
  hello_.rank = hello.rank;
  hello_.pid = peer_credentials(socket_.get()).pid;
  const bool valid = got == Receive::kMessage && hello.magic == kWireMagic && hello.to == self_.uuid &&
                     hello.token == self_.token && hello.from != self_.uuid;
  return valid ? Step::kProven : Step::kRefused;
}

Stranger::Step Stranger::advance() {
  if (!remote_) return take_hello();
  int error = 0;
  if (!challenged_) {
    const Receive got = receive_rest(socket_.get(), &input_, &hello_, sizeof hello_, &error);
    if (got != Receive::kMessage) return got == Receive::kNothing ? Step::kWaits : Step::kRefused;
    hello_.hostname[sizeof hello_.hostname - 1] = '\0';
    if (hello_.magic != kWireMagic || hello_.to != self_.uuid || hello_.from == self_.uuid) return Step::kRefused;
    if (fill_random("group_create", challenge_.nonce, sizeof challenge_.nonce) != PHX_OK) return Step::kRefused;
    challenge_.proof = make_host_proof(HostSide::kListener, self_.token, hello_, challenge_.nonce);
    if (!send_record(socket_.get(), &challenge_, sizeof challenge_)) return Step::kRefused;
    challenged_ = true;
  }
  HostProof proof;
  const Receive got = receive_rest(socket_.get(), &input_, &proof, sizeof proof, &error);
  if (got != Receive::kMessage) return got == Receive::kNothing ? Step::kWaits : Step::kRefused;
  const store::Digest expected = make_host_proof(HostSide::kDialer, self_.token, hello_, challenge_.nonce);
  return store::equal_in_constant_time(proof.proof, expected) ? Step::kProven : Step::kRefused;
}

std::string Stranger::name() const {
  return remote_ ? address_of_peer(socket_.get()) : "pid " + std::to_string(peer_credentials(socket_.get()).pid);
}

LinkRef Stranger::make_link() {
  const std::string hostname = hello_.hostname[0] != '\0' || !remote_ ? hello_.hostname : name();
  return std::make_shared<Link>(hello_.from, hello_.rank, hello_.pid, std::move(socket_), hostname);
}

// ---- the side that dials

Dial::Step Dial::begin() {
  again_ns_ = 0;
  if (error_.status != PHX_OK) return await_end();
  phase_ = Phase::kConnecting;
  input_.clear();
  if (!remote_) {
    const int error = connect_abstract(socket_name(peer_.uuid), &socket_);
    if (socket_.valid()) return error != 0 ? lost(error) : greet();
  } else {
    const store::Endpoint endpoint = endpoint_of(peer_.address);
    socket_ = Fd(::socket(endpoint.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (socket_.valid()) {
      const auto *const address = reinterpret_cast<const sockaddr *>(&endpoint.address);
      const bool begun =
          connect(socket_.get(), address, endpoint.length) == 0 || errno == EINPROGRESS || errno == EINTR;
      return begun ? Step::kWaits : lost(errno);
    }
  }
  return give_up(fail_errno(errno, kCreate, "could not make a socket"));
}

uint32_t Dial::events() const { return phase_ == Phase::kConnecting ? EPOLLOUT : EPOLLIN; }

Dial::Step Dial::advance() {
  if (phase_ == Phase::kConnecting) {
    pollfd entry{socket_.get(), POLLOUT, 0};
    if (poll(&entry, 1, 0) <= 0) return Step::kWaits;
    const int error = store::connect_outcome(socket_.get());
    if (error == 0 && only_asks_) return Step::kDone;
    const Step step = error != 0 ? lost(error) : greet_host();
    if (step != Step::kWaits) return step;
  }
  if (phase_ == Phase::kGreeted) {
    HostChallenge challenge;
    const Step step = receive(&challenge, sizeof challenge);
    if (step != Step::kDone) return step;
    const store::Digest expected = make_host_proof(HostSide::kListener, peer_.token, hello_, challenge.nonce);
    if (!store::equal_in_constant_time(challenge.proof, expected))
      return give_up(fail(PHX_ERR_PERMISSION, kCreate,
                          "what answers at %s does not prove that it is %s; another program listens there, or the "
                          "record in the store is stale",
                          text_of(peer_.address).c_str(), who().c_str()));
    const HostProof proof{make_host_proof(HostSide::kDialer, peer_.token, hello_, challenge.nonce)};
    if (!send_record(socket_.get(), &proof, sizeof proof)) return lost(errno);
    phase_ = Phase::kProven;
  }
  Welcome welcome{};
  const Step step = receive(&welcome, sizeof welcome);
  if (step != Step::kDone) return step;
  if (welcome.magic == kWireMagic && welcome.from == peer_.uuid) return Step::kDone;
  return give_up(fail(PHX_ERR_PERMISSION, kCreate, "%s sent a malformed handshake; refused", who().c_str()));
}

Dial::Step Dial::greet() {
  // Any process may bind a free abstract name, so the user that answers is checked before anything is sent.
  const ucred peer = peer_credentials(socket_.get());
  if (peer.uid == kNoUser)
    return give_up(
        fail(PHX_ERR_PERMISSION, kCreate, "%s answers on a socket without credentials; refused", who().c_str()));
  if (peer.uid != self_.uid)
    return give_up(fail(PHX_ERR_PERMISSION, kCreate, "%s runs as another user; ranks of a group must run as one user",
                        who().c_str()));
  pid_ = peer.pid;
  phase_ = Phase::kProven;
  const Hello hello{kWireMagic, self_.rank, self_.uuid, peer_.uuid, peer_.token};
  return send_record(socket_.get(), &hello, sizeof hello) ? Step::kWaits : lost(errno);
}

Dial::Step Dial::greet_host() {
  tune_host_connection(socket_.get());
  hello_ = {kWireMagic, self_.rank, self_.uuid, peer_.uuid, {}, self_.pid, 0, {}};
  std::memcpy(hello_.hostname, self_.hostname, sizeof hello_.hostname);
  const phx_status filled = fill_random("group_create", hello_.nonce, sizeof hello_.nonce);
  if (filled != PHX_OK) return give_up(Failed(filled));
  if (!send_record(socket_.get(), &hello_, sizeof hello_)) return lost(errno);
  phase_ = Phase::kGreeted;
  return Step::kWaits;
}

// kDone: *record is there.
Dial::Step Dial::receive(void *record, size_t size) {
  int error = 0;
  const Receive got = remote_ ? receive_rest(socket_.get(), &input_, record, size, &error)
                              : receive_record(socket_.get(), record, size);
  if (got == Receive::kNothing) return Step::kWaits;
  return got == Receive::kMessage ? Step::kDone : lost(error);
}

// `error`: 0 if the other side has closed the connection.
Dial::Step Dial::lost(int error) {
  if (remote_) return lost_to_host(error);
  if (phase_ == Phase::kConnecting) {
    if (error == EAGAIN || error == EINTR)
      return pause(kFullPauseMs);  // its queue is full; there is nothing to wait on
    give_up(fail_errno(error, kCreate, "rank %d (pid %d, %s) does not accept connections", peer_.rank, peer_.pid,
                       process_state(peer_.pid)));
  } else {
    give_up(fail(PHX_ERR_PERMISSION, kCreate, "%s %s", who().c_str(),
                 error != 0 ? "closed the connection during the handshake"
                            : "refused the handshake (another user, or a stale record in the store)"));
  }
  end_by_ns_ = now_ns() + kEndingMs * 1000000;
  return await_end();
}

// Where the kernel does not tell that a process is exiting, its sockets close a moment before it counts as ended. So
// the error of a rank of this host waits for a moment, and is another one if the process has ended.
Dial::Step Dial::await_end() {
  if (has_ended(peer_)) return give_up(died(peer_));
  return now_ns() < end_by_ns_ ? pause(kEndPauseMs) : Step::kFailed;
}

Dial::Step Dial::lost_to_host(int error) {
  const std::string address = text_of(peer_.address);
  if (error == ECONNREFUSED)
    return give_up(fail(PHX_ERR_PEER_DEAD, kCreate,
                        "%s died, or its world was finalized: nothing listens at %s any more", who().c_str(),
                        address.c_str()));
  if (only_asks_) return Step::kDone;
  const bool unanswered = error == ETIMEDOUT && phase_ == Phase::kConnecting;
  if (!unanswered && error != 0 && error != ECONNRESET && error != EPIPE && error != ETIMEDOUT)
    return give_up(fail_errno(error, kCreate,
                              "could not connect to %s at %s; see whether the hosts reach each other there, or name "
                              "another interface in PHALANX_SOCKET_IFNAME on that host",
                              who().c_str(), address.c_str()));
  if (!unanswered && ++losses_ == kMostLosses)
    return give_up(fail(PHX_ERR_PERMISSION, kCreate,
                        "%s refused the handshake %d times at %s; another program listens there, or the record in "
                        "the store is stale",
                        who().c_str(), losses_, address.c_str()));
  last_loss_ = address + (unanswered ? " did not answer" : " closed the connection during the handshake");
  return pause(std::min(kLongestPauseMs, kFirstPauseMs << std::min(losses_, 8)));
}

Dial::Step Dial::pause(int64_t ms) {
  socket_.reset();
  again_ns_ = now_ns() + ms * 1000000;
  return Step::kPauses;
}

Dial::Step Dial::give_up(const Failed &failed) {
  failed.peer(peer_.rank);
  socket_.reset();
  error_ = last_error();
  return Step::kFailed;
}

LinkRef Dial::make_link() {
  return std::make_shared<Link>(peer_.uuid, peer_.rank, remote_ ? peer_.pid : pid_, std::move(socket_),
                                remote_ ? peer_.hostname : "");
}

std::string Dial::who() const {
  return "rank " + std::to_string(peer_.rank) + " (pid " + std::to_string(peer_.pid) +
         (remote_ ? ", on host " + std::string(peer_.hostname) : "") + ")";
}

std::string Dial::lack() const {
  if (!remote_) return pauses() ? "did not accept a connection" : "did not connect";
  const std::string address = text_of(peer_.address), begin = "did not connect: ";
  if (pauses()) return begin + last_loss_ + ", and is tried again";
  if (phase_ == Phase::kConnecting)
    return begin + address +
           " does not answer. See whether that host runs and no firewall drops the packets, or name another interface "
           "in PHALANX_SOCKET_IFNAME there";
  return begin + address +
         " accepts connections, but its process does not answer. See whether it is stopped or overloaded";
}

}  // namespace phx
