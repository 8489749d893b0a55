#include "world/identity.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "base/fd.h"

namespace phx {
namespace {

// Reads a small file of /proc whole. Empty if that fails.
std::string read_small_file(const char *path, bool *missing = nullptr) {
  Fd fd(open(path, O_RDONLY | O_CLOEXEC));
  if (missing != nullptr) *missing = !fd.valid() && (errno == ENOENT || errno == ESRCH);
  if (!fd.valid()) return {};
  char buffer[2048];
  const ssize_t size = read(fd.get(), buffer, sizeof buffer);
  return size > 0 ? std::string(buffer, static_cast<size_t>(size)) : std::string();
}

// The fields of /proc/PID/stat after the command name, which may itself hold spaces and parentheses.
std::string stat_tail(int32_t pid, bool *missing = nullptr) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const std::string text = read_small_file(path, missing);
  const size_t end = text.rfind(')');
  return end == std::string::npos || end + 2 > text.size() ? std::string() : text.substr(end + 2);
}

// Field `number` of proc(5), 4 or later, of such a tail, which starts with field 3; 0 if there is none.
uint64_t stat_field(const std::string &tail, int number) {
  const char *p = tail.c_str();
  for (int field = 3; field < number && p != nullptr; ++field) {
    p = std::strchr(p, ' ');
    if (p != nullptr) ++p;
  }
  return p == nullptr || *p == '\0' ? 0 : std::strtoull(p, nullptr, 10);
}

}  // namespace

Uuid random_uuid() {
  Uuid uuid;
  char *next = reinterpret_cast<char *>(&uuid);
  size_t left = sizeof uuid;
  while (left > 0) {
    const ssize_t got = getrandom(next, left, 0);
    if (got <= 0) continue;  // EINTR: the call cannot fail otherwise
    next += got;
    left -= static_cast<size_t>(got);
  }
  return uuid;
}

Uuid process_uuid() {
  static std::mutex mutex;
  static Uuid uuid;
  static int32_t pid = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (pid != getpid()) {
    pid = getpid();
    uuid = random_uuid();
  }
  return uuid;
}

uint64_t hash_bytes(const void *data, size_t size, uint64_t seed) {
  uint64_t hash = seed;
  for (const unsigned char *p = static_cast<const unsigned char *>(data), *end = p + size; p != end; ++p)
    hash = (hash ^ *p) * 0x100000001b3ull;
  return hash;
}

uint64_t detect_host_id() {
  const std::string boot = read_small_file("/proc/sys/kernel/random/boot_id");
  uint64_t hash = hash_bytes(boot.data(), boot.size());
  struct stat info;
  if (stat("/proc/self/ns/net", &info) == 0) {
    const uint64_t inode = info.st_ino;
    hash = hash_bytes(&inode, sizeof inode, hash);
  }
  return hash == 0 ? 1 : hash;
}

uint64_t process_start_time(int32_t pid) { return stat_field(stat_tail(pid), 22); }

const char *process_state(int32_t pid) {
  bool missing = false;
  const std::string tail = stat_tail(pid, &missing);
  if (tail.empty()) return missing ? "gone" : "unknown";  // unknown: such as where no descriptor is left to look
  if (tail[0] == 'Z' || tail[0] == 'X') return "zombie";
  constexpr uint64_t kExiting = 4;  // PF_EXITING of the kernel's flags, field 9
  if ((stat_field(tail, 9) & kExiting) != 0) return "exiting";
  switch (tail[0]) {
    case 'R': return "running";
    case 'S':
    case 'D':
    case 'I': return "sleeping";
    case 'T':
    case 't': return "stopped";
    default: return "unknown";
  }
}

bool process_has_ended(int32_t pid) {
  const std::string state = process_state(pid);
  return state == "gone" || state == "zombie" || state == "exiting";
}

std::string socket_name(const Uuid &uuid) {
  char name[64];
  std::snprintf(name, sizeof name, "phalanx-%016" PRIx64 "%016" PRIx64, uuid.high, uuid.low);
  return name;
}

}  // namespace phx
