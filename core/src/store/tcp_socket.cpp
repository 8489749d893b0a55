// Sockets of the TCP store: see the header.
#include "store/tcp_socket.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/error.h"

namespace phx::store {
namespace {

bool parse(const char *address, Endpoint *out) {
  auto *const ipv4 = reinterpret_cast<sockaddr_in *>(&out->address);
  auto *const ipv6 = reinterpret_cast<sockaddr_in6 *>(&out->address);
  if (inet_pton(AF_INET, address, &ipv4->sin_addr) == 1) {
    ipv4->sin_family = AF_INET;
    out->length = sizeof *ipv4;
    return true;
  }
  const std::string literal(address);
  const size_t percent = literal.find('%');
  if (inet_pton(AF_INET6, literal.substr(0, percent).c_str(), &ipv6->sin6_addr) != 1) return false;
  ipv6->sin6_family = AF_INET6;
  out->length = sizeof *ipv6;
  if (percent == std::string::npos) return true;
  ipv6->sin6_scope_id = if_nametoindex(literal.c_str() + percent + 1);
  return ipv6->sin6_scope_id != 0;
}

int wait_ready(int fd, short events, const Deadline &deadline) {
  for (;;) {
    pollfd entry{fd, events, 0};
    const int ready = poll(&entry, 1, deadline.slice_ms());
    if (ready > 0) return kDone;
    if (ready < 0 && errno != EINTR) return errno;
    if (ready == 0 && deadline.passed()) return kTimedOut;
  }
}

// Calls move(offset, size), which is send or recv, until all is moved.
template <class Move>
int transfer_all(int fd, short events, size_t size, const Deadline &deadline, Move move) {
  for (size_t moved = 0; moved < size;) {
    const ssize_t count = move(moved, size - moved);
    if (count > 0) {
      moved += static_cast<size_t>(count);
    } else if (count == 0 || errno == EPIPE || errno == ECONNRESET) {
      return kClosed;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      const int waited = wait_ready(fd, events, deadline);
      if (waited != kDone) return waited;
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return kDone;
}

// Whether both ends of a connection are this socket. A connect to a port of the ephemeral range without a listener may
// meet itself (RFC 793, simultaneous open).
bool connected_to_itself(int fd) {
  sockaddr_storage mine{}, theirs{};
  socklen_t mine_length = sizeof mine, theirs_length = sizeof theirs;
  if (getsockname(fd, reinterpret_cast<sockaddr *>(&mine), &mine_length) != 0) return false;
  if (getpeername(fd, reinterpret_cast<sockaddr *>(&theirs), &theirs_length) != 0) return false;
  return mine_length == theirs_length && std::memcmp(&mine, &theirs, mine_length) == 0;
}

}  // namespace

// The port lies at the same place in both kinds of address.
static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
uint16_t Endpoint::port() const { return ntohs(reinterpret_cast<const sockaddr_in *>(&address)->sin_port); }
void Endpoint::set_port(uint16_t port) { reinterpret_cast<sockaddr_in *>(&address)->sin_port = htons(port); }

std::string Endpoint::text() const {
  const bool ipv6 = address.ss_family == AF_INET6;
  return (ipv6 ? "[" : "") + host + (ipv6 ? "]:" : ":") + std::to_string(port());
}

phx_status parse_endpoint(const char *operation, const char *address, uint16_t port, Endpoint *out) {
  if (address == nullptr) return fail(PHX_ERR_INVALID, operation, "the address is NULL");
  Endpoint endpoint;
  if (!parse(address, &endpoint))
    return fail(PHX_ERR_INVALID, operation,
                "'%.64s' is neither an IPv4 nor an IPv6 address; names are not looked up: give for example 127.0.0.1 "
                "or ::1",
                address);
  endpoint.host = address;
  endpoint.set_port(port);
  *out = endpoint;
  return PHX_OK;
}

phx_status listen_on(const char *operation, Endpoint *endpoint, Fd *out) {
  Fd fd(socket(endpoint->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return fail_errno(errno, operation, "could not make a socket for %s", endpoint->text().c_str());
  const int on = 1;
  // Connections of a server that has just ended must not keep its port from the next one.
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  // "::" means IPv6 alone: the server binds exactly the address that was given.
  if (endpoint->address.ss_family == AF_INET6) setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  auto *address = reinterpret_cast<sockaddr *>(&endpoint->address);
  if (bind(fd.get(), address, endpoint->length) != 0)
    return fail_errno(errno, operation, "could not bind to %s; give an address of this host and a free port, or port 0",
                      endpoint->text().c_str());
  if (listen(fd.get(), SOMAXCONN) != 0)
    return fail_errno(errno, operation, "could not listen on %s", endpoint->text().c_str());
  socklen_t length = sizeof endpoint->address;
  if (getsockname(fd.get(), address, &length) != 0)
    return fail_errno(errno, operation, "could not learn the port of %s", endpoint->text().c_str());
  *out = std::move(fd);
  return PHX_OK;
}

void tune_connection(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);  // so that the death of the peer's machine is noticed
}

int connect_outcome(int fd) {
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
  // Else the port would be taken from the server that is about to start there.
  return error == 0 && connected_to_itself(fd) ? ECONNREFUSED : error;
}

std::string transfer_text(int outcome) {
  if (outcome == kTimedOut) return "no answer in time";
  if (outcome == kClosed) return "the connection was closed";
  char buffer[128];
  return strerror_r(outcome, buffer, sizeof buffer);
}

int connect_before(const Endpoint &endpoint, const Deadline &deadline, Fd *out) {
  Fd fd(socket(endpoint.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return errno;
  if (connect(fd.get(), reinterpret_cast<const sockaddr *>(&endpoint.address), endpoint.length) != 0) {
    if (errno != EINPROGRESS && errno != EINTR) return errno;
    const int waited = wait_ready(fd.get(), POLLOUT, deadline);
    if (waited != kDone) return waited;
  }
  const int outcome = connect_outcome(fd.get());
  if (outcome != kDone) return outcome;
  tune_connection(fd.get());
  *out = std::move(fd);
  return kDone;
}

int send_all(int fd, const void *data, size_t size, const Deadline &deadline) {
  return transfer_all(fd, POLLOUT, size, deadline, [&](size_t offset, size_t left) {
    return send(fd, static_cast<const char *>(data) + offset, left, MSG_NOSIGNAL);
  });
}

int receive_all(int fd, void *data, size_t size, const Deadline &deadline) {
  return transfer_all(fd, POLLIN, size, deadline, [&](size_t offset, size_t left) {
    return recv(fd, static_cast<char *>(data) + offset, left, 0);
  });
}

}  // namespace phx::store
