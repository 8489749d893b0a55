// The address at which this rank accepts ranks of other hosts.
#pragma once

#include <sys/socket.h>

#include <string>

#include "base/fd.h"
#include "phalanx/phalanx.h"
#include "store/tcp_socket.h"
#include "world/identity.h"

namespace phx {

// Chooses an address of this host, without a port. The first of these that exists:
//   1. that of an interface that PHALANX_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names (a comma separated list; the first
//      interface with an address counts). Fails with the names of the interfaces if none of them has an address;
//   2. that on the way to `hint`, a host name or an address; empty: none is known;
//   3. that of this host's name;
//   4. that on the default way;
//   5. an address of the loopback device. Until here such an address does not count.
// IPv4 comes before IPv6. Sends nothing, but a name that is not an address is looked up, which may take the time of the
// resolver.
phx_status choose_address(const char *operation, const std::string &hint, HostAddress *out);
// A listening socket at that address, at a free port, which it fills in.
phx_status listen_at(const char *operation, HostAddress *address, Fd *out);

store::Endpoint endpoint_of(const HostAddress &address);
std::string text_of(const HostAddress &address);  // "10.0.0.1:4567"
// The address of this end of a socket (getsockname) or of the other (getpeername). Family 0: it is not of the internet.
HostAddress socket_address(int socket, int (*end)(int, sockaddr *, socklen_t *));
bool is_loopback(const HostAddress &address);
// The address at the other end of a TCP connection, for the log.
std::string address_of_peer(int socket);
// No delay, and the detection of a host that is gone, within about 11 s.
void tune_host_connection(int socket);
inline constexpr int kHostTimeoutMs = 10000;  // after which a connection that gets no answer from the other kernel ends

}  // namespace phx
