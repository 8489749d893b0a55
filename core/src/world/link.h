// One kept connection to a peer, which carries small messages: to a rank of this host an abstract SOCK_SEQPACKET
// socket, which also carries file descriptors; to a rank of another host a TCP connection (world/host_handshake.h), on
// which each message is an Envelope and its payload, one after the other.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/fork.h"
#include "phalanx/phalanx.h"
#include "world/identity.h"

namespace phx {

// ---- what crosses

inline constexpr uint32_t kWireMagic = 0x31584850;  // "PHX1"
inline constexpr size_t kMaxPayload = 4096;
inline constexpr size_t kMaxFds = 4;

struct Hello {  // dialer -> listener, first; the dialer has read the listener's record, so their builds are equal
  uint32_t magic;
  int32_t rank;
  Uuid from;
  Uuid to;
  Uuid token;  // the listener's, from its record in the store
};
struct Welcome {  // the answer
  uint32_t magic;
  int32_t rank;
  Uuid from;
};

// kDeath: the sender has seen the process of that world end; the payload is the world's id.
enum class MessageKind : uint16_t { kExchange = 1, kRevoke = 2, kGoodbye = 3, kDeath = 4 };

// The numbers of messages of kExchange in a group. Exchanges count up from 1; the descriptors of one have its number
// and kDescriptors. Above them are the numbers of the message ring between two GPUs (kRing) and of agreements.
inline constexpr uint64_t kDescriptors = uint64_t{1} << 61;
inline constexpr uint64_t kRing = uint64_t{1} << 62;
inline constexpr uint64_t kAgreements = uint64_t{1} << 63;

struct Envelope {
  uint32_t magic;
  MessageKind kind;
  uint16_t fd_count;
  uint64_t group_id;
  uint64_t ordinal;
  uint32_t payload_bytes;
  uint32_t call;  // of kExchange: which collective call it belongs to; numbered in group/exchange.cpp
};

struct Message {
  Envelope envelope{};
  std::string payload;
  std::vector<Fd> fds;
  bool asked = false;  // this rank is in the exchange that it belongs to, so it is not counted
};

// ---- the connection

enum class LinkState : int { kAlive = 0, kLeft = 1, kDead = 2 };

struct Link final : private ForkHook {
  // `host`: the name of the other host; empty for a peer of this host.
  Link(const Uuid &peer, int32_t peer_rank, int32_t peer_pid, Fd connected, const std::string &host = {});

  const Uuid uuid;
  const int32_t rank;          // as the peer's world numbers itself
  const int32_t pid;           // by SO_PEERCRED, not by what the peer says; on its own host if it is remote
  const bool remote;           // the peer is on another host: no descriptors can be sent to it
  const std::string hostname;  // of a remote peer
  Fd socket;
  Fd pidfd;  // invalid for a remote peer, a peer in this process, or on kernels without it
  std::atomic<LinkState> state{LinkState::kAlive};
  std::mutex send_mutex;           // held for single system calls, never while waiting
  std::deque<std::string> outbox;  // what the monitor sends once there is room; guarded by send_mutex
  size_t outbox_sent = 0;          // bytes of its first message that are sent already; of a remote link
  // Called with send_mutex held when something was put into the outbox. The monitor sets it when it takes the link.
  std::function<void()> on_outbox;
  std::atomic<int> lost_error{0};  // an errno with which a remote connection ended; the kernel tells it only once
  std::string input;               // the begin of a message of a remote link; the monitor thread's own
  std::string ending;              // for errors: why this rank closed the connection; written before the state
  // Messages that this rank has received and not asked for yet, and the descriptors in them; guarded by the monitor's
  // mutex.
  uint32_t queued = 0, queued_fds = 0;

  bool gone() const { return state.load() != LinkState::kAlive; }
  // Whether the process of the peer has ended; false for a remote one, of which only the connection can be seen.
  bool process_has_ended() const { return !remote && phx::process_has_ended(pid); }
  // "running" and so on; "on host NAME" for a remote peer.
  const char *process_state_text() const { return remote ? where_.c_str() : process_state(pid); }
  // How the peer is told of once the link has ended: it left, or a process of this host has died, or the connection to
  // another host was lost.
  const char *fate() const {
    if (state.load() == LinkState::kLeft) return "has left: its world was finalized";
    return remote && !ending.empty() ? ending.c_str() : "died";
  }
  void close();  // ends a send that is waiting, then closes both descriptors

 private:
  const std::string where_;
  // The connection of a process ends with it, not with its last forked child.
  void after_fork_in_child() override {
    socket.reset();
    pidfd.reset();
  }
};
using LinkRef = std::shared_ptr<Link>;

// A listening socket of that name, non-blocking.
phx_status listen_abstract(const std::string &name, Fd *out);
// Connects to such a socket, without waiting. Returns 0 or an errno: EAGAIN if its queue of connections is full. *out
// is invalid if no socket could be made.
int connect_abstract(const std::string &name, Fd *out);
inline constexpr int64_t kLookMs = 20;  // how often a rank that waits for another looks whether that one has ended

// Whether the process that wrote this record has ended: none has its pid and start time, and its socket is gone.
bool has_ended(const PeerRecord &record);
Failed died(const PeerRecord &record);  // the error that says so
// Whether its world has ended, though the process may live on: its socket is gone. Only for a record of this host, like
// has_ended.
bool has_left(const PeerRecord &record);

// The user and process on the other end. The user is kNoUser if the kernel will not say.
ucred peer_credentials(int socket);
inline constexpr uid_t kNoUser = static_cast<uid_t>(-1);

// kFull: there is no room now. kInFlight: the kernel lets no more descriptors be under way. kFailed: see *error.
enum class Sent { kDone, kFull, kInFlight, kFailed };
// Never waits, and records no error. If only a part of a message to a remote peer could be sent, the rest goes to the
// outbox; while that is not empty, later messages to that peer find no room.
Sent try_send(Link &link, const Envelope &envelope, const void *payload, const int *fds, int *error);
Sent try_send_locked(Link &link, const Envelope &envelope, const void *payload, const int *fds, int *error);
// Sends as much of the outbox as there is room for. Needs send_mutex.
void flush_outbox_locked(Link &link);
// The error that says why try_send failed; PHX_ERR_PEER_DEAD where the connection has ended.
phx_status send_failed(const Link &link, int error);
// Waits until there may be room, for a few milliseconds at most.
void await_room(Link &link, Sent seen, const Deadline &deadline);

enum class Receive { kMessage, kNothing, kClosed, kMalformed };
// Never blocks. A malformed message is one that no correct peer sends; its descriptors are closed.
Receive receive_message(int socket, Message *out);
// The same for a link of either kind; the begin of a message that is not complete stays in link.input.
Receive receive_message(Link &link, Message *out);
// Why the connection to a remote peer has ended, for Link::ending.
std::string why_lost(const Link &link);
// The same for a raw record of fixed size (the handshake).
Receive receive_record(int socket, void *record, size_t size);
bool send_record(int socket, const void *record, size_t size);

}  // namespace phx
