// Sockets of the TCP store: see the header.
#include "store/tcp_socket.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace phx::store {
namespace {

bool parse_ipv4(const char *address, Endpoint *out) {
  auto *ipv4 = reinterpret_cast<sockaddr_in *>(&out->address);
  if (inet_pton(AF_INET, address, &ipv4->sin_addr) != 1) return false;
  ipv4->sin_family = AF_INET;
  out->length = sizeof *ipv4;
  return true;
}

bool parse_ipv6(const char *address, Endpoint *out) {
  auto *ipv6 = reinterpret_cast<sockaddr_in6 *>(&out->address);
  std::string literal(address);
  const size_t percent = literal.find('%');
  if (percent != std::string::npos) {
    ipv6->sin6_scope_id = if_nametoindex(literal.c_str() + percent + 1);
    if (ipv6->sin6_scope_id == 0) return false;
    literal.resize(percent);
  }
  if (inet_pton(AF_INET6, literal.c_str(), &ipv6->sin6_addr) != 1) return false;
  ipv6->sin6_family = AF_INET6;
  out->length = sizeof *ipv6;
  return true;
}

void write_text(const char *address, Endpoint *endpoint) {
  const bool ipv6 = endpoint->address.ss_family == AF_INET6;
  endpoint->text = (ipv6 ? "[" : "") + std::string(address) + (ipv6 ? "]:" : ":") + std::to_string(endpoint->port());
}

Transfer wait_ready(int fd, short events, const Deadline &deadline, int *error) {
  for (;;) {
    pollfd entry{fd, events, 0};
    const int ready = poll(&entry, 1, deadline.slice_ms());
    if (ready > 0) return Transfer::kDone;
    if (ready < 0 && errno != EINTR) {
      *error = errno;
      return Transfer::kFailed;
    }
    if (ready == 0 && deadline.passed()) return Transfer::kTimedOut;
  }
}

Transfer failed_with(int *error, int reason) {
  *error = reason;
  return Transfer::kFailed;
}

}  // namespace

std::string Endpoint::host() const {
  const std::string host = text.substr(0, text.rfind(':'));
  return host.empty() || host.front() != '[' ? host : host.substr(1, host.size() - 2);
}

uint16_t Endpoint::port() const {
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6 *>(&address)->sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in *>(&address)->sin_port);
}

void Endpoint::set_port(uint16_t port) {
  if (address.ss_family == AF_INET6)
    reinterpret_cast<sockaddr_in6 *>(&address)->sin6_port = htons(port);
  else
    reinterpret_cast<sockaddr_in *>(&address)->sin_port = htons(port);
}

phx_status parse_endpoint(const char *operation, const char *address, uint16_t port, Endpoint *out) {
  if (address == nullptr) return fail(PHX_ERR_INVALID, operation, "the address is NULL");
  Endpoint endpoint;
  std::memset(&endpoint.address, 0, sizeof endpoint.address);
  if (!parse_ipv4(address, &endpoint) && !parse_ipv6(address, &endpoint))
    return fail(PHX_ERR_INVALID, operation,
                "'%.64s' is neither an IPv4 nor an IPv6 address; names are not looked up: give for example 127.0.0.1 "
                "or ::1",
                address);
  endpoint.set_port(port);
  write_text(address, &endpoint);
  *out = endpoint;
  return PHX_OK;
}

phx_status listen_on(const char *operation, Endpoint *endpoint, Fd *out) {
  Fd fd(socket(endpoint->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return fail_errno(errno, operation, "could not make a socket for %s", endpoint->text.c_str());
  const int on = 1;
  // Connections of a server that has just ended must not keep its port from the next one.
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  // "::" means IPv6 alone: the server binds exactly the address that was given.
  if (endpoint->address.ss_family == AF_INET6) setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  auto *address = reinterpret_cast<sockaddr *>(&endpoint->address);
  if (bind(fd.get(), address, endpoint->length) != 0)
    return fail_errno(errno, operation, "could not bind to %s; give an address of this host and a free port, or port 0",
                      endpoint->text.c_str());
  if (listen(fd.get(), SOMAXCONN) != 0)
    return fail_errno(errno, operation, "could not listen on %s", endpoint->text.c_str());
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (getsockname(fd.get(), reinterpret_cast<sockaddr *>(&bound), &length) != 0)
    return fail_errno(errno, operation, "could not learn the port of %s", endpoint->text.c_str());
  endpoint->address = bound;
  endpoint->text.resize(endpoint->text.rfind(':') + 1);
  endpoint->text += std::to_string(endpoint->port());
  *out = std::move(fd);
  return PHX_OK;
}

void tune_connection(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);  // so that the death of the peer's machine is noticed
}

bool connected_to_itself(int fd) {
  sockaddr_storage mine{}, theirs{};
  socklen_t mine_length = sizeof mine, theirs_length = sizeof theirs;
  if (getsockname(fd, reinterpret_cast<sockaddr *>(&mine), &mine_length) != 0) return false;
  if (getpeername(fd, reinterpret_cast<sockaddr *>(&theirs), &theirs_length) != 0) return false;
  return mine_length == theirs_length && std::memcmp(&mine, &theirs, mine_length) == 0;
}

std::string transfer_text(Transfer result, int error) {
  if (result == Transfer::kTimedOut) return "no answer in time";
  if (result == Transfer::kClosed) return "the connection was closed";
  char buffer[128];
  return strerror_r(error, buffer, sizeof buffer);
}

Transfer connect_before(const Endpoint &endpoint, const Deadline &deadline, Fd *out, int *error) {
  Fd fd(socket(endpoint.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return failed_with(error, errno);
  if (connect(fd.get(), reinterpret_cast<const sockaddr *>(&endpoint.address), endpoint.length) != 0) {
    if (errno != EINPROGRESS && errno != EINTR) return failed_with(error, errno);
    const Transfer waited = wait_ready(fd.get(), POLLOUT, deadline, error);
    if (waited != Transfer::kDone) return waited;
    int outcome = 0;
    socklen_t length = sizeof outcome;
    getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &outcome, &length);
    if (outcome != 0) return failed_with(error, outcome);
  }
  // Else the port would be taken from the server that is about to start there.
  if (connected_to_itself(fd.get())) return failed_with(error, ECONNREFUSED);
  tune_connection(fd.get());
  *out = std::move(fd);
  return Transfer::kDone;
}

Transfer send_all(int fd, const void *data, size_t size, const Deadline &deadline, int *error) {
  const auto *bytes = static_cast<const char *>(data);
  while (size > 0) {
    const ssize_t sent = send(fd, bytes, size, MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes += sent;
      size -= static_cast<size_t>(sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      const Transfer waited = wait_ready(fd, POLLOUT, deadline, error);
      if (waited != Transfer::kDone) return waited;
    } else if (errno == EPIPE || errno == ECONNRESET) {
      return Transfer::kClosed;
    } else if (errno != EINTR) {
      return failed_with(error, errno);
    }
  }
  return Transfer::kDone;
}

Transfer receive_all(int fd, void *data, size_t size, const Deadline &deadline, int *error) {
  auto *bytes = static_cast<char *>(data);
  while (size > 0) {
    const ssize_t got = recv(fd, bytes, size, 0);
    if (got > 0) {
      bytes += got;
      size -= static_cast<size_t>(got);
    } else if (got == 0 || errno == ECONNRESET) {
      return Transfer::kClosed;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      const Transfer waited = wait_ready(fd, POLLIN, deadline, error);
      if (waited != Transfer::kDone) return waited;
    } else if (errno != EINTR) {
      return failed_with(error, errno);
    }
  }
  return Transfer::kDone;
}

}  // namespace phx::store
