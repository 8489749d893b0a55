// What the targets of the protocol between ranks share: descriptors of all kinds, and raw messages with them.
#pragma once

#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/un.h>

#include <linux/sockios.h>
#include <sched.h>

#include <vector>

#include "base/fd.h"
#include "input.h"
#include "world/link.h"

namespace fuzz {

constexpr size_t kMostFds = 6;  // more than a message may have
enum class Memory { kGood, kSmall, kUnsealed, kReadOnly, kNotWritable, kNone, kKinds };

// A descriptor that is memory of `size` bytes, or nearly so.
inline phx::Fd make_memory(Memory kind, size_t size) {
  if (kind == Memory::kNone) return phx::Fd(eventfd(0, EFD_CLOEXEC));
  phx::Fd fd(memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  MUST(fd.valid() && ftruncate(fd.get(), static_cast<off_t>(kind == Memory::kSmall ? size / 2 : size)) == 0);
  int seals = F_SEAL_GROW | F_SEAL_SEAL;
  if (kind != Memory::kUnsealed) seals |= F_SEAL_SHRINK;
  if (kind == Memory::kNotWritable) seals |= F_SEAL_WRITE;
  MUST(fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
  if (kind != Memory::kReadOnly) return fd;
  return phx::Fd(open(("/proc/self/fd/" + std::to_string(fd.get())).c_str(), O_RDONLY | O_CLOEXEC));
}

inline sockaddr_un abstract(const phx::Uuid &uuid, socklen_t *length) {
  const std::string name = phx::socket_name(uuid);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

inline phx::Fd connect_to(const phx::Uuid &uuid) {
  socklen_t length = 0;
  const sockaddr_un address = abstract(uuid, &length);
  phx::Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  int status;
  do {
    status = connect(fd.get(), reinterpret_cast<const sockaddr *>(&address), length);
  } while (status != 0 && errno == EINTR);
  if (status != 0) fd.reset();
  return fd;
}

// One datagram. False when the other side takes no more, or is gone.
inline bool send_raw(int socket, const std::string &bytes, const std::vector<int> &fds) {
  char control[CMSG_SPACE(sizeof(int) * kMostFds)] = {};
  iovec part{const_cast<char *>(bytes.data()), bytes.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr *item = CMSG_FIRSTHDR(&header);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(item), fds.data(), sizeof(int) * fds.size());
  }
  return sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

template <class T>
std::string as_bytes(const T &value) {
  return std::string(reinterpret_cast<const char *>(&value), sizeof value);
}

// Waits until the other side has taken all that was sent, or is gone.
inline void until_taken(int socket) {
  for (int left = 1; ioctl(socket, SIOCOUTQ, &left) == 0 && left > 0;) sched_yield();
}

}  // namespace fuzz
