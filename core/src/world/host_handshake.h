// How two ranks connect. On one host the dialer says Hello and the listener answers Welcome, and the kernel tells each
// of them the user of the other. Over TCP each proves that it knows the token of the one that listens:
//
//   dialer -> listener  HostHello       who dials whom, and random bytes
//   listener -> dialer  HostChallenge   random bytes, and a proof of the listener over the hello and these bytes
//   dialer -> listener  HostProof       a proof of the dialer over the same
//   listener -> dialer  Welcome         as on a Unix socket
//
// A proof is an HMAC-SHA-256 under the token of the listener, which stands in its record in the store and never crosses
// the connection. Neither side believes what the other one says before its proof. The messages after the handshake are
// neither signed nor encrypted: between its hosts a job needs a network that it trusts, as other libraries of
// collectives do. The bytes have the order of the host: all hosts are little-endian, of one build (PeerRecord::build).
#pragma once

#include <cstdint>
#include <string>

#include "store/sha256.h"
#include "world/host_address.h"
#include "world/link.h"

namespace phx {

struct HostHello {
  uint32_t magic;
  int32_t rank;
  Uuid from;
  Uuid to;
  uint8_t nonce[16];
  int32_t pid;
  uint32_t unused;  // zero
  char hostname[64];
};
struct HostChallenge {
  uint8_t nonce[16];
  store::Digest proof;
};
struct HostProof {
  store::Digest proof;
};
enum class HostSide { kListener, kDialer };
store::Digest make_host_proof(HostSide side, const Uuid &token, const HostHello &hello, const uint8_t (&nonce)[16]);

// A connection to a listener of this rank whose handshake is not over. A forked child closes its copy of the socket.
class Stranger final : private ForkHook {
 public:
  // `remote`: it came over TCP.
  Stranger(Fd socket, const PeerRecord &self, bool remote) : self_(self), remote_(remote), socket_(std::move(socket)) {}

  enum class Step { kWaits, kProven, kRefused };
  Step advance();  // takes in what has come; never waits
  // Whether a remote one has sent nothing, as one that only asks whether this rank listens.
  bool said_nothing() const { return remote_ && input_.empty() && !challenged_; }
  const Uuid &peer() const { return hello_.from; }  // true once the step is kProven
  std::string name() const;                         // "pid 17", or the address of a remote one
  LinkRef make_link();                              // of one that is proven: takes the socket

 private:
  void after_fork_in_child() override { socket_.reset(); }
  Step take_hello();

  const PeerRecord &self_;
  const bool remote_;
  Fd socket_;
  std::string input_;
  bool challenged_ = false;
  HostHello hello_{};  // of a rank of this host: its id, rank and pid
  HostChallenge challenge_{};
};

// A connection to a rank that is being made. The monitor's thread advances it. One that only asks is done once the
// other host has answered: it fails if the rank listens no more, and never for another reason.
class Dial final : private ForkHook {
 public:
  Dial(const PeerRecord &self, const PeerRecord &peer, bool only_asks)
      : self_(self), peer_(peer), remote_(on_another_host(self, peer)), only_asks_(only_asks) {
    peer_.hostname[sizeof peer_.hostname - 1] = '\0';  // it came from the store
  }

  // kPauses: begin() is to be called at again_ns(): the connection was lost during the handshake, or could not be made
  // yet. kFailed: see error().
  enum class Step { kWaits, kDone, kPauses, kFailed };
  Step begin();    // starts to connect; never waits
  Step advance();  // takes in what has happened; never waits
  const PeerRecord &peer() const { return peer_; }
  bool only_asks() const { return only_asks_; }
  int socket() const { return socket_.get(); }
  uint32_t events() const;  // of epoll, for which advance() waits
  int64_t again_ns() const { return again_ns_; }
  bool pauses() const { return again_ns_ != 0; }
  bool failed() const { return error_.status != PHX_OK && !pauses(); }
  const ErrorInfo &error() const { return error_; }
  LinkRef make_link();  // of one that is done: takes the socket
  // "did not connect: 10.0.0.2:4567 does not answer; ...": what has not happened yet.
  std::string lack() const;

 private:
  enum class Phase { kConnecting, kGreeted, kProven };
  void after_fork_in_child() override { socket_.reset(); }
  Step greet();
  Step greet_host();
  Step receive(void *record, size_t size);
  Step lost(int error);
  Step lost_to_host(int error);
  Step await_end();
  Step pause(int64_t ms);
  Step give_up(const Failed &failed);
  std::string who() const;  // "rank 5 (pid 4123, on host nodeb)"

  const PeerRecord &self_;
  PeerRecord peer_;
  const bool remote_;
  const bool only_asks_;
  Fd socket_;
  Phase phase_ = Phase::kConnecting;
  std::string input_;
  HostHello hello_{};
  int32_t pid_ = 0;       // of a rank of this host
  int losses_ = 0;        // during the handshake
  int64_t again_ns_ = 0;  // 0: it does not pause
  std::string last_loss_;
  ErrorInfo error_;        // also while await_end() pauses
  int64_t end_by_ns_ = 0;  // of await_end()
};

}  // namespace phx
