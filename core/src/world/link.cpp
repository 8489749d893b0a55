#include "world/link.h"

#include <poll.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/wait.h"
#include "world/host_address.h"

namespace phx {
namespace {

socklen_t abstract_address(const std::string &name, sockaddr_un *address) {
  std::memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());  // [0] stays zero: the abstract namespace
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

Fd open_pidfd(int32_t pid) {
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
  if (pid <= 0 || pid == getpid()) return Fd();
  return Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

// Whether a receive on a socket of this host is to be tried again. A peer that closes its end with messages unread
// resets the connection, and the kernel says so, once, before it gives what that peer sent last.
bool reads_on(int error) { return error == EINTR || error == ECONNRESET; }

bool is_lost(int error) {
  return error == EPIPE || error == ECONNRESET || error == ENOTCONN || error == ETIMEDOUT || error == EHOSTUNREACH ||
         error == ENETUNREACH || error == ENETDOWN || error == EHOSTDOWN;
}

// Returns how many bytes the kernel took, or -1 with *error set.
ssize_t send_some(Link &link, const msghdr &header, int *error) {
  for (;;) {
    const ssize_t sent = sendmsg(link.socket.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    *error = sent < 0 ? errno : 0;
    if (*error == EINTR) continue;
    if (link.remote && sent < 0 && *error != EAGAIN && *error != EPIPE) link.lost_error.store(*error);
    return sent;
  }
}

// Takes the first message out of *input. kNothing: it is not complete.
Receive take_message(std::string *input, Message *out) {
  Envelope envelope{};
  if (input->size() < sizeof envelope) return Receive::kNothing;
  std::memcpy(&envelope, input->data(), sizeof envelope);
  if (envelope.magic != kWireMagic || envelope.payload_bytes > kMaxPayload || envelope.fd_count != 0)
    return Receive::kMalformed;
  const size_t size = sizeof envelope + envelope.payload_bytes;
  if (input->size() < size) return Receive::kNothing;
  out->envelope = envelope;
  out->payload.assign(*input, sizeof envelope, envelope.payload_bytes);
  out->fds.clear();
  input->erase(0, size);
  return Receive::kMessage;
}

}  // namespace

Link::Link(const Uuid &peer, int32_t peer_rank, int32_t peer_pid, Fd connected, const std::string &host)
    : uuid(peer),
      rank(peer_rank),
      pid(peer_pid),
      remote(!host.empty()),
      hostname(host),
      socket(std::move(connected)),
      where_("on host " + host) {
  if (!remote) pidfd = open_pidfd(peer_pid);  // not an initializer: a fork meanwhile must find an empty descriptor
}

bool has_ended(const PeerRecord &record) {
  if (process_start_time(record.pid) == record.start_time && !process_has_ended(record.pid)) return false;
  // In another namespace of processes its pid means nothing to this process. The socket of a dead one is gone.
  return has_left(record);
}

bool has_left(const PeerRecord &record) {
  Fd fd;
  return connect_abstract(socket_name(record.uuid), &fd) == ECONNREFUSED;
}

void Link::close() {
  if (socket.valid()) shutdown(socket.get(), SHUT_RDWR);
  std::lock_guard<std::mutex> sending(send_mutex);
  socket.reset();
  pidfd.reset();
}

phx_status listen_abstract(const std::string &name, Fd *out) {
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return fail_errno(errno, "world_create", "could not make a socket");
  sockaddr_un address;
  const socklen_t length = abstract_address(name, &address);
  if (bind(fd.get(), reinterpret_cast<sockaddr *>(&address), length) != 0 || listen(fd.get(), 128) != 0)
    return fail_errno(errno, "world_create", "could not listen on the abstract socket %s", name.c_str());
  *out = std::move(fd);
  return PHX_OK;
}

int connect_abstract(const std::string &name, Fd *out) {
  sockaddr_un address;
  const socklen_t length = abstract_address(name, &address);
  *out = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (out->valid() && connect(out->get(), reinterpret_cast<sockaddr *>(&address), length) == 0) return 0;
  return errno;
}

ucred peer_credentials(int socket) {
  ucred credentials;
  socklen_t size = sizeof credentials;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0 && size == sizeof credentials)
    return credentials;
  return {0, kNoUser, static_cast<gid_t>(-1)};
}

Failed died(const PeerRecord &record) {
  return fail(PHX_ERR_PEER_DEAD, "group_create", "rank %d (pid %d) died", record.rank, record.pid).peer(record.rank);
}

bool send_record(int socket, const void *record, size_t size) {
  return send(socket, record, size, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(size);
}

Receive receive_record(int socket, void *record, size_t size) {
  char buffer[256];
  ssize_t got = 0;
  do got = recv(socket, buffer, sizeof buffer, MSG_DONTWAIT | MSG_TRUNC);
  while (got < 0 && reads_on(errno));
  if (got < 0) return errno == EAGAIN ? Receive::kNothing : Receive::kClosed;
  if (got == 0) return Receive::kClosed;
  if (static_cast<size_t>(got) != size) return Receive::kMalformed;
  std::memcpy(record, buffer, size);
  return Receive::kMessage;
}

Sent try_send(Link &link, const Envelope &envelope, const void *payload, const int *fds, int *error) {
  std::lock_guard<std::mutex> lock(link.send_mutex);
  return try_send_locked(link, envelope, payload, fds, error);
}

void flush_outbox_locked(Link &link) {
  while (!link.outbox.empty() && link.socket.valid()) {
    std::string &bytes = link.outbox.front();
    int error = 0;
    if (link.remote) {
      iovec rest{&bytes[link.outbox_sent], bytes.size() - link.outbox_sent};
      msghdr header{};
      header.msg_iov = &rest;
      header.msg_iovlen = 1;
      const ssize_t sent = send_some(link, header, &error);
      if (sent < 0 && error == EAGAIN) return;
      link.outbox_sent += sent < 0 ? rest.iov_len : static_cast<size_t>(sent);
      if (link.outbox_sent < bytes.size()) continue;
      link.outbox_sent = 0;
    } else {
      Envelope envelope;
      std::memcpy(&envelope, bytes.data(), sizeof envelope);
      if (try_send_locked(link, envelope, bytes.data() + sizeof envelope, nullptr, &error) == Sent::kFull) return;
    }
    link.outbox.pop_front();  // also after a failure: the end of the connection is seen by who reads from it
  }
}

Sent try_send_locked(Link &link, const Envelope &envelope, const void *payload, const int *fds, int *error) {
  const bool impossible = link.remote && envelope.fd_count != 0;
  // After close() the descriptor is -1, and the kernel's EBADF would say less.
  *error = impossible ? EOPNOTSUPP : EPIPE;
  if (impossible || !link.socket.valid()) return Sent::kFailed;
  if (link.remote && !link.outbox.empty()) flush_outbox_locked(link);
  if (link.remote && !link.outbox.empty()) return Sent::kFull;
  char control[CMSG_SPACE(sizeof(int) * kMaxFds)];
  iovec parts[2] = {{const_cast<Envelope *>(&envelope), sizeof envelope},
                    {const_cast<void *>(payload), envelope.payload_bytes}};
  msghdr header{};
  header.msg_iov = parts;
  header.msg_iovlen = envelope.payload_bytes > 0 ? 2 : 1;
  if (fds != nullptr && envelope.fd_count > 0) {
    std::memset(control, 0, sizeof control);
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * envelope.fd_count);
    cmsghdr *item = CMSG_FIRSTHDR(&header);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(sizeof(int) * envelope.fd_count);
    std::memcpy(CMSG_DATA(item), fds, sizeof(int) * envelope.fd_count);
  }
  const ssize_t sent = send_some(link, header, error);
  // The descriptors of one user that are sent and not yet received are limited to RLIMIT_NOFILE.
  if (sent < 0) return *error == EAGAIN ? Sent::kFull : *error == ETOOMANYREFS ? Sent::kInFlight : Sent::kFailed;
  if (!link.remote || static_cast<size_t>(sent) == sizeof envelope + envelope.payload_bytes) return Sent::kDone;
  std::string bytes(reinterpret_cast<const char *>(&envelope), sizeof envelope);
  if (envelope.payload_bytes > 0) bytes.append(static_cast<const char *>(payload), envelope.payload_bytes);
  link.outbox.push_back(std::move(bytes));
  link.outbox_sent = static_cast<size_t>(sent);
  if (link.on_outbox) link.on_outbox();
  return Sent::kDone;
}

phx_status send_failed(const Link &link, int error) {
  if (is_lost(error))
    return fail_text(PHX_ERR_PEER_DEAD, "send", "rank %d (pid %d, %s) %s", link.rank, link.pid,
                     link.process_state_text(), link.remote ? why_lost(link).c_str() : "closed its connection")
        .peer(link.rank);
  return fail_errno(error, "send", "could not reach rank %d (pid %d)", link.rank, link.pid).peer(link.rank);
}

void await_room(Link &link, Sent seen, const Deadline &deadline) {
  constexpr int64_t kMostMs = 5;  // then the caller looks at what else may have happened
  const int64_t ms = std::min(kMostMs, deadline.left_ms());
  if (seen == Sent::kInFlight) {  // the kernel offers nothing to wait on
    usleep(static_cast<useconds_t>(std::min<int64_t>(ms, 1) * 1000));
    return;
  }
  int fd = -1;
  {
    std::lock_guard<std::mutex> lock(link.send_mutex);
    fd = link.socket.get();
  }
  pollfd entry{fd, POLLOUT, 0};  // should it be closed meanwhile, the next attempt to send says so
  if (fd >= 0) poll(&entry, 1, static_cast<int>(ms));
}

Receive receive_message(int socket, Message *out) {
  char payload[kMaxPayload];
  char control[CMSG_SPACE(sizeof(int) * kMaxFds)];
  Envelope envelope{};
  iovec parts[2] = {{&envelope, sizeof envelope}, {payload, sizeof payload}};
  msghdr header{};
  header.msg_iov = parts;
  header.msg_iovlen = 2;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t got = 0;
  do got = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  while (got < 0 && reads_on(errno));
  if (got < 0) return errno == EAGAIN ? Receive::kNothing : Receive::kClosed;

  // Descriptors first: whatever is wrong with the rest, they belong to this process now and must be closed.
  std::vector<Fd> fds;
  for (cmsghdr *item = CMSG_FIRSTHDR(&header); item != nullptr; item = CMSG_NXTHDR(&header, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(item) + i * sizeof fd, sizeof fd);
      fds.emplace_back(fd);
    }
  }
  if (got == 0) return Receive::kClosed;
  if ((header.msg_flags & MSG_TRUNC) != 0) return Receive::kMalformed;
  if (static_cast<size_t>(got) < sizeof envelope || envelope.magic != kWireMagic) return Receive::kMalformed;
  if (envelope.payload_bytes != static_cast<size_t>(got) - sizeof envelope || envelope.fd_count > kMaxFds)
    return Receive::kMalformed;
  // If this process has no descriptors left, the kernel drops those of the message; the code that takes it sees that.
  const bool dropped = (header.msg_flags & MSG_CTRUNC) != 0 && fds.size() < envelope.fd_count;
  if (envelope.fd_count != fds.size() && !dropped) return Receive::kMalformed;
  out->envelope = envelope;
  out->payload.assign(payload, envelope.payload_bytes);
  out->fds = std::move(fds);
  return Receive::kMessage;
}

Receive receive_message(Link &link, Message *out) {
  if (!link.remote) return receive_message(link.socket.get(), out);
  for (;;) {
    const Receive taken = take_message(&link.input, out);
    if (taken != Receive::kNothing) return taken;
    char buffer[2 * kMaxPayload];
    const ssize_t got = recv(link.socket.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (got > 0) {
      link.input.append(buffer, static_cast<size_t>(got));
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return Receive::kNothing;
    if (got < 0) link.lost_error.store(errno);
    return Receive::kClosed;
  }
}

std::string why_lost(const Link &link) {
  const int error = link.lost_error.load();
  std::string why = "closed by the other side: its process has ended";
  if (error == ECONNRESET) why = "connection reset: its process has ended, or the network has cut it";
  if (error == ETIMEDOUT) why = "timed out after " + std::to_string(kHostTimeoutMs / 1000) + " s without an answer";
  char buffer[128];
  if (error != 0 && error != ECONNRESET && error != ETIMEDOUT) why = strerror_r(error, buffer, sizeof buffer);
  return "is gone: the connection to host " + link.hostname + " was lost (" + why + ")";
}

}  // namespace phx
