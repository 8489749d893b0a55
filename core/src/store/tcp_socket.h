// Sockets of the TCP store: addresses, and blocking transfers that end at a deadline. Sockets are non-blocking.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "base/deadline.h"
#include "base/fd.h"

namespace phx::store {

struct Endpoint {
  std::string host;  // the address without the port, as it was given
  sockaddr_storage address{};
  socklen_t length = 0;

  uint16_t port() const;
  void set_port(uint16_t port);
  std::string text() const;  // "127.0.0.1:1234", for errors
};

// Takes IPv4 and IPv6 literals ("fe80::1%eth0" too) and no names: looking one up could take for ever.
phx_status parse_endpoint(const char *operation, const char *address, uint16_t port, Endpoint *out);

// Both record the thread's error on failure.
phx_status listen_on(const char *operation, Endpoint *endpoint, Fd *out);  // fills in the port
void tune_connection(int fd);                                              // no delay, keep-alive

// How a connect that has ended went: 0, or the number of the error.
int connect_outcome(int fd);

// How a transfer ended: kDone, or one of the next two, or the number of the error.
inline constexpr int kDone = 0, kTimedOut = -1, kClosed = -2;
std::string transfer_text(int outcome);  // of one that is not kDone

int connect_before(const Endpoint &endpoint, const Deadline &deadline, Fd *out);
int send_all(int fd, const void *data, size_t size, const Deadline &deadline);
int receive_all(int fd, void *data, size_t size, const Deadline &deadline);

}  // namespace phx::store
