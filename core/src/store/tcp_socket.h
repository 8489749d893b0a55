// Sockets of the TCP store: addresses, and blocking transfers that end at a deadline. Sockets are non-blocking.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "base/deadline.h"
#include "base/fd.h"
#include "phalanx/phalanx.h"

namespace phx::store {

struct Endpoint {
  sockaddr_storage address;
  socklen_t length = 0;
  std::string text;  // "127.0.0.1:1234", for errors

  std::string host() const;  // the address without the port
  uint16_t port() const;
  void set_port(uint16_t port);
};

// Takes IPv4 and IPv6 literals ("fe80::1%eth0" too) and no names: looking one up could take for ever.
phx_status parse_endpoint(const char *operation, const char *address, uint16_t port, Endpoint *out);

// Both record the thread's error on failure.
phx_status listen_on(const char *operation, Endpoint *endpoint, Fd *out);  // fills in the port
void tune_connection(int fd);                                              // no delay, keep-alive

// How a transfer ended; kFailed leaves the reason in *error.
enum class Transfer { kDone, kTimedOut, kClosed, kFailed };
// Whether both ends of a connection are this socket. A connect to a port of the ephemeral range without a listener may
// meet itself (RFC 793, simultaneous open).
bool connected_to_itself(int fd);
std::string transfer_text(Transfer result, int error);  // of one that is not kDone

Transfer connect_before(const Endpoint &endpoint, const Deadline &deadline, Fd *out, int *error);
Transfer send_all(int fd, const void *data, size_t size, const Deadline &deadline, int *error);
Transfer receive_all(int fd, void *data, size_t size, const Deadline &deadline, int *error);

}  // namespace phx::store
