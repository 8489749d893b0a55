#include "net/dead_sockets.h"

#include <dirent.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>

namespace phx::net {
namespace {

// The fifth retransmission is sent 6 s after the first one at the shortest interval that Linux uses (200 ms, doubled
// each time).
constexpr unsigned kUnanswered = 5;
constexpr unsigned kSilenceMs = 8000;

bool has(int fd, int level, int option, int value) {
  int found = 0;
  socklen_t size = sizeof found;
  return getsockopt(fd, level, option, &found, &size) == 0 && found == value;
}

bool is_of_ucx(int fd) {
  return has(fd, SOL_SOCKET, SO_PROTOCOL, IPPROTO_TCP) && has(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdleSeconds) &&
         has(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepIntervalSeconds) && has(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepCount);
}

bool is_dead(int fd) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  const bool unanswered = info.tcpi_retransmits >= kUnanswered || info.tcpi_probes >= kUnanswered;
  return unanswered && info.tcpi_last_ack_recv >= kSilenceMs;
}

}  // namespace

void shut_dead_sockets() {
  DIR *const directory = opendir("/proc/self/fd");
  if (directory == nullptr) return;
  while (const dirent *const entry = readdir(directory)) {
    char *end = nullptr;
    const long fd = std::strtol(entry->d_name, &end, 10);
    if (end == entry->d_name || *end != '\0') continue;
    if (is_of_ucx(static_cast<int>(fd)) && is_dead(static_cast<int>(fd)))
      (void)shutdown(static_cast<int>(fd), SHUT_RDWR);
  }
  closedir(directory);
}

}  // namespace phx::net
