// What UCX cannot be told about its TCP connections: that the host behind one is gone, and that one must end at once.
//
// TCP sends unacknowledged data again for a quarter of an hour before it gives a connection up, and keepalive probes
// are not sent meanwhile; UCX does nothing about it. TCP_USER_TIMEOUT does not help: it also ends a connection whose
// receiver is alive but computes, and so has a full window. Hence the sockets are looked at: one whose peer has
// acknowledged nothing in several retransmissions or probes is shut down, which UCX reports as a lost connection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace phx::net {

// How UCX is told to set keepalive up. It does so for the sockets that it connects, which are recognised by these
// unusual values.
constexpr int kKeepIdleSeconds = 7, kKeepIntervalSeconds = 1, kKeepCount = 3;

// The sockets of one worker of UCX, and those of other workers that it has connected.
class TcpSockets {
 public:
  // To be called before and after the worker is made: finds the ports at which it accepts connections. `address`: the
  // worker's.
  void before_worker();
  void after_worker(const void *address, size_t bytes);

  // Shuts those whose peers are gone.
  void shut_dead() const;
  // Shuts those that lead to the host of a worker's address. Closing an endpoint of UCX does not do that: if its peer
  // has connected too, over the same socket, UCX goes on reading from it, into the buffers of this process. Connections
  // to other ranks of that host may be lost by it. Returns how many sockets there were.
  int shut_to(const void *address, size_t bytes) const;

 private:
  bool is_one(int fd) const;
  template <class Chosen>
  int shut(Chosen chosen) const;

  std::vector<uint16_t> ports_;
};

}  // namespace phx::net
