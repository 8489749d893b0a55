#include "net/tcp_sockets.h"

#include <dirent.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "world/host_address.h"

namespace phx::net {
namespace {

// The fifth retransmission is sent 6 s after the data, at the shortest intervals that Linux uses (200 ms, doubled each
// time).
constexpr unsigned kUnanswered = 5;
constexpr unsigned kSilenceMs = 8000;

bool has(int fd, int level, int option, int value) {
  int found = 0;
  socklen_t size = sizeof found;
  return getsockopt(fd, level, option, &found, &size) == 0 && found == value;
}
bool is_tcp(int fd) { return has(fd, SOL_SOCKET, SO_PROTOCOL, IPPROTO_TCP); }

// Whether the peer's host is in an address of UCX. Such an address does not name the loopback.
bool leads_to(int fd, const void *address, size_t bytes) {
  const HostAddress peer = socket_address(fd, getpeername);
  if (peer.family == 0) return false;
  return is_loopback(peer) ||
         memmem(address, bytes, peer.ip, peer.family == AF_INET6 ? sizeof(in6_addr) : sizeof(in_addr)) != nullptr;
}

bool is_dead(int fd) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  const bool unanswered = info.tcpi_retransmits >= kUnanswered || info.tcpi_probes >= kUnanswered;
  return unanswered && info.tcpi_last_ack_recv >= kSilenceMs;
}

template <class Body>
void for_each_descriptor(Body body) {
  DIR *const directory = opendir("/proc/self/fd");
  if (directory == nullptr) return;
  while (const dirent *const entry = readdir(directory)) {
    char *end = nullptr;
    const long fd = std::strtol(entry->d_name, &end, 10);
    if (end != entry->d_name && *end == '\0') body(static_cast<int>(fd));
  }
  closedir(directory);
}

std::vector<uint16_t> listening_ports() {
  std::vector<uint16_t> ports;
  for_each_descriptor([&](int fd) {
    if (is_tcp(fd) && has(fd, SOL_SOCKET, SO_ACCEPTCONN, 1)) ports.push_back(socket_address(fd, getsockname).port);
  });
  return ports;
}

bool contains(const std::vector<uint16_t> &ports, uint16_t port) {
  return std::find(ports.begin(), ports.end(), port) != ports.end();
}

}  // namespace

void TcpSockets::before_worker() { ports_ = listening_ports(); }

void TcpSockets::after_worker(const void *address, size_t bytes) {
  std::vector<uint16_t> own;
  for (const uint16_t port : listening_ports()) {
    const uint16_t sent = htons(port);
    if (!contains(ports_, port) && memmem(address, bytes, &sent, sizeof sent) != nullptr) own.push_back(port);
  }
  ports_ = std::move(own);
}

bool TcpSockets::is_one(int fd) const {
  if (!is_tcp(fd) || has(fd, SOL_SOCKET, SO_ACCEPTCONN, 1)) return false;
  return contains(ports_, socket_address(fd, getsockname).port) ||
         (has(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdleSeconds) &&
          has(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepIntervalSeconds) && has(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepCount));
}

template <class Chosen>
int TcpSockets::shut(Chosen chosen) const {
  int count = 0;
  for_each_descriptor([&](int fd) {
    if (is_one(fd) && chosen(fd) && shutdown(fd, SHUT_RDWR) == 0) ++count;
  });
  return count;
}

void TcpSockets::shut_dead() const { (void)shut(is_dead); }

int TcpSockets::shut_to(const void *address, size_t bytes) const {
  return shut([&](int fd) { return leads_to(fd, address, bytes); });
}

}  // namespace phx::net
