#include "world/host_handshake.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/deadline.h"
#include "base/entropy.h"
#include "store/tcp_socket.h"

namespace phx {
namespace {

// A listener with too many strangers closes some, and a connection may be cut: then the dialer tries again.
constexpr int kMostLosses = 8;
constexpr int64_t kFirstPauseMs = 20, kLongestPauseMs = 2000;

// Reads no more than what is missing of a record of that size. kMessage: *input has all of it.
Receive receive_rest(int socket, std::string *input, size_t size, int *error) {
  while (input->size() < size) {
    char buffer[256];
    const ssize_t got = recv(socket, buffer, std::min(sizeof buffer, size - input->size()), MSG_DONTWAIT);
    *error = got < 0 ? errno : 0;
    if (got < 0 && *error == EINTR) continue;
    if (got < 0 && *error == EAGAIN) return Receive::kNothing;
    if (got <= 0) return Receive::kClosed;
    input->append(buffer, static_cast<size_t>(got));
  }
  return Receive::kMessage;
}

template <class Record>
void take_record(std::string *input, Record *out) {
  std::memcpy(static_cast<void *>(out), input->data(), sizeof *out);
  input->clear();
}

}  // namespace

store::Digest make_host_proof(HostSide side, const Uuid &token, const HostHello &hello, const uint8_t (&nonce)[16]) {
  store::HmacSha256 mac(&token, sizeof token);
  // The sides differ, so that one side's proof cannot be used as the other's. Both words have equal length.
  mac.update(side == HostSide::kListener ? "listens " : "dials   ", 8);
  mac.update(&hello, sizeof hello);
  mac.update(nonce, sizeof nonce);
  return mac.finish();
}

// ---- the side that listens

HostStranger::Step HostStranger::advance() {
  int error = 0;
  if (!challenged_) {
    const Receive got = receive_rest(socket_.get(), &input_, sizeof hello_, &error);
    if (got == Receive::kNothing) return Step::kWaits;
    if (got != Receive::kMessage) return Step::kRefused;
    take_record(&input_, &hello_);
    hello_.hostname[sizeof hello_.hostname - 1] = '\0';
    if (hello_.magic != kWireMagic || hello_.to != self_.uuid || hello_.from == self_.uuid) return Step::kRefused;
    if (fill_random("group_create", challenge_.nonce, sizeof challenge_.nonce) != PHX_OK) return Step::kRefused;
    challenge_.proof = make_host_proof(HostSide::kListener, self_.token, hello_, challenge_.nonce);
    if (!send_record(socket_.get(), &challenge_, sizeof challenge_)) return Step::kRefused;
    challenged_ = true;
  }
  const Receive got = receive_rest(socket_.get(), &input_, sizeof(HostProof), &error);
  if (got == Receive::kNothing) return Step::kWaits;
  if (got != Receive::kMessage) return Step::kRefused;
  HostProof proof;
  take_record(&input_, &proof);
  const store::Digest expected = make_host_proof(HostSide::kDialer, self_.token, hello_, challenge_.nonce);
  return store::equal_in_constant_time(proof.proof, expected) ? Step::kProven : Step::kRefused;
}

LinkRef HostStranger::make_link() {
  const std::string hostname = hello_.hostname[0] != '\0' ? hello_.hostname : address_of_peer(socket_.get());
  return std::make_shared<Link>(hello_.from, hello_.rank, hello_.pid, std::move(socket_), hostname);
}

// ---- the side that dials

HostDial::Step HostDial::begin() {
  const store::Endpoint endpoint = endpoint_of(peer_.address);
  again_ns_ = 0;
  phase_ = Phase::kConnecting;
  input_.clear();
  socket_ = Fd(::socket(endpoint.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_.valid()) return give_up(fail_errno(errno, "group_create", "could not make a socket").peer(peer_.rank));
  if (connect(socket_.get(), reinterpret_cast<const sockaddr *>(&endpoint.address), endpoint.length) == 0 ||
      errno == EINPROGRESS || errno == EINTR)
    return Step::kWaits;
  return lost(errno);
}

uint32_t HostDial::events() const { return phase_ == Phase::kConnecting ? EPOLLOUT : EPOLLIN; }

HostDial::Step HostDial::advance() {
  if (phase_ == Phase::kConnecting) {
    pollfd entry{socket_.get(), POLLOUT, 0};
    if (poll(&entry, 1, 0) <= 0) return Step::kWaits;
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error == 0 && store::connected_to_itself(socket_.get())) error = ECONNREFUSED;
    if (error == 0 && only_asks_) return Step::kDone;
    const Step step = error != 0 ? lost(error) : connected();
    if (step != Step::kWaits) return step;
  }
  if (phase_ == Phase::kGreeted) {
    HostChallenge challenge;
    const Step step = receive(&challenge, sizeof challenge);
    if (step != Step::kDone) return step;
    const store::Digest expected = make_host_proof(HostSide::kListener, peer_.token, hello_, challenge.nonce);
    if (!store::equal_in_constant_time(challenge.proof, expected))
      return give_up(fail(PHX_ERR_PERMISSION, "group_create",
                          "what answers at %s does not prove that it is rank %d (pid %d, on host %s); "
                          "another program "
                          "listens there, or the record in the store is stale",
                          text_of(peer_.address).c_str(), peer_.rank, peer_.pid, peer_.hostname)
                         .peer(peer_.rank));
    const HostProof proof{make_host_proof(HostSide::kDialer, peer_.token, hello_, challenge.nonce)};
    if (!send_record(socket_.get(), &proof, sizeof proof)) return lost(errno);
    phase_ = Phase::kProven;
  }
  Welcome welcome{};
  const Step step = receive(&welcome, sizeof welcome);
  if (step != Step::kDone) return step;
  if (welcome.magic == kWireMagic && welcome.from == peer_.uuid) return Step::kDone;
  return give_up(fail(PHX_ERR_PERMISSION, "group_create",
                      "rank %d (pid %d, on host %s) sent a malformed handshake; refused", peer_.rank, peer_.pid,
                      peer_.hostname)
                     .peer(peer_.rank));
}

HostDial::Step HostDial::connected() {
  tune_host_connection(socket_.get());
  hello_ = {};
  hello_.magic = kWireMagic;
  hello_.rank = self_.rank;
  hello_.from = self_.uuid;
  hello_.to = peer_.uuid;
  hello_.pid = self_.pid;
  std::memcpy(hello_.hostname, self_.hostname, sizeof hello_.hostname);
  const phx_status filled = fill_random("group_create", hello_.nonce, sizeof hello_.nonce);
  if (filled != PHX_OK) return give_up(Failed(filled));
  if (!send_record(socket_.get(), &hello_, sizeof hello_)) return lost(errno);
  phase_ = Phase::kGreeted;
  return Step::kWaits;
}

// kDone: *record is there.
HostDial::Step HostDial::receive(void *record, size_t size) {
  int error = 0;
  const Receive got = receive_rest(socket_.get(), &input_, size, &error);
  if (got == Receive::kNothing) return Step::kWaits;
  if (got != Receive::kMessage) return lost(error);
  std::memcpy(record, input_.data(), size);
  input_.clear();
  return Step::kDone;
}

// `error`: 0 if the other side has closed the connection.
HostDial::Step HostDial::lost(int error) {
  const std::string address = text_of(peer_.address);
  if (error == ECONNREFUSED)
    return give_up(fail(PHX_ERR_PEER_DEAD, "group_create",
                        "rank %d (pid %d, on host %s) died, or its world was finalized: nothing listens "
                        "at %s any more",
                        peer_.rank, peer_.pid, peer_.hostname, address.c_str())
                       .peer(peer_.rank));
  if (only_asks_) return Step::kDone;
  if (error == ETIMEDOUT && phase_ == Phase::kConnecting) return pause(address + " did not answer");
  if (error == 0 || error == ECONNRESET || error == EPIPE || error == ETIMEDOUT) {
    if (++losses_ < kMostLosses) return pause(address + " closed the connection during the handshake");
    return give_up(fail(PHX_ERR_PERMISSION, "group_create",
                        "rank %d (pid %d, on host %s) refused the handshake %d times at %s; another "
                        "program listens there, or the record in the store is stale",
                        peer_.rank, peer_.pid, peer_.hostname, losses_, address.c_str())
                       .peer(peer_.rank));
  }
  return give_up(fail_errno(error, "group_create",
                            "could not connect to rank %d (pid %d, on host %s) at %s; see whether the "
                            "hosts reach each other there, or name another interface in PHALANX_SOCKET_IFNAME on that "
                            "host",
                            peer_.rank, peer_.pid, peer_.hostname, address.c_str())
                     .peer(peer_.rank));
}

HostDial::Step HostDial::pause(const std::string &why) {
  socket_.reset();
  last_loss_ = why;
  const int64_t ms = std::min(kLongestPauseMs, kFirstPauseMs << std::min(losses_, 8));
  again_ns_ = now_ns() + ms * 1000000;
  return Step::kPauses;
}

HostDial::Step HostDial::give_up(const Failed &) {
  socket_.reset();
  error_ = last_error();
  return Step::kFailed;
}

LinkRef HostDial::make_link() {
  return std::make_shared<Link>(peer_.uuid, peer_.rank, peer_.pid, std::move(socket_), peer_.hostname);
}

std::string HostDial::waiting() const {
  const std::string address = text_of(peer_.address);
  if (pauses()) return last_loss_ + ", and is tried again";
  if (phase_ == Phase::kConnecting)
    return address +
           " does not answer. See whether that host runs and no firewall drops the packets, or name another interface "
           "in PHALANX_SOCKET_IFNAME there";
  return address + " accepts connections, but its process does not answer. See whether it is stopped or overloaded";
}

}  // namespace phx
