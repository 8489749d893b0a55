// Notices that the host behind a TCP connection of UCX is gone.
//
// TCP keeps sending unacknowledged data again for a quarter of an hour before it gives a connection up, and keepalive
// probes are not sent meanwhile; UCX does nothing about it. TCP_USER_TIMEOUT is no remedy: it also ends a connection
// whose receiver is alive but computes, and so has a full window. Hence the sockets are looked at: one whose peer has
// acknowledged nothing in several retransmissions or probes is shut down, which UCX reports as a lost connection.
#pragma once

namespace phx::net {

// How UCX is told to set keepalive up. The values are also what its sockets are recognised by: they are unusual.
constexpr int kKeepIdleSeconds = 7, kKeepIntervalSeconds = 1, kKeepCount = 3;

// Looks at all sockets of this process that UCX has set up so.
void shut_dead_sockets();

}  // namespace phx::net
