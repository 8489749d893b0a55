#include "world/identity.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <system_error>

#include "base/entropy.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/fork.h"
#include "base/hash.h"

namespace phx {
namespace {

// Reads a small file of /proc whole. Empty if that fails; `missing` says whether it failed because the process is gone,
// which may happen between the opening and the reading.
std::string read_small_file(const char *path, bool *missing = nullptr) {
  const Fd fd(open(path, O_RDONLY | O_CLOEXEC));
  char buffer[2048];
  const ssize_t size = fd.valid() ? read(fd.get(), buffer, sizeof buffer) : -1;
  if (missing != nullptr) *missing = size < 0 && (errno == ENOENT || errno == ESRCH);
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
  if (fill_random("world_create", &uuid, sizeof uuid) != PHX_OK) throw std::runtime_error(last_error().text);
  return uuid;
}

Uuid process_uuid() {
  static auto &mutex = *new AcrossForks<std::mutex>;  // never destroyed: worlds may be made while the process exits
  static Uuid uuid;
  static uint32_t generation = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (generation != process_generation()) {
    uuid = random_uuid();
    generation = process_generation();
  }
  return uuid;
}

HostFacts read_host_facts() {
  HostFacts facts{};
  const std::string boot = read_small_file("/proc/sys/kernel/random/boot_id");
  if (!boot.empty()) facts.boot = hash_bytes(boot.data(), boot.size());
  struct stat info;
  if (stat("/proc/self/ns/net", &info) == 0) facts.network = info.st_ino;
  return facts;
}

uint64_t host_id_of(const HostFacts &facts) {
  const uint64_t hash = hash_bytes(&facts, sizeof facts);
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

std::string why_apart(const PeerRecord &a, int rank_a, const PeerRecord &b, int rank_b) {
  const bool other_boot = a.host.boot != 0 && b.host.boot != 0 && a.host.boot != b.host.boot;
  const bool other_network = a.host.network != 0 && b.host.network != 0 && a.host.network != b.host.network;
  if (a.host_id == b.host_id && !other_boot && !other_network) return {};
  const std::string both = "ranks " + std::to_string(rank_a) + " and " + std::to_string(rank_b);
  const auto given = [](const PeerRecord &record, int rank) {
    char id[32];
    std::snprintf(id, sizeof id, "%" PRIu64, record.host_id);
    return "rank " + std::to_string(rank) +
           (record.host_given != 0 ? std::string(" was given ") + id : std::string(" was given none"));
  };
  // What the ids say comes from the caller; what the kernel says comes after it.
  if (a.host_id != b.host_id && (a.host_given != 0 || b.host_given != 0))
    return both + " have different host ids, so they count as ranks of different hosts: " + given(a, rank_a) + " and " +
           given(b, rank_b) +
           ". Set PHALANX_HOST_ID (phx_world_params.host_id) to one value on all ranks of a host, or on none.";
  if (other_boot) return both + " are on different hosts and share no memory";
  if (other_network)
    return both + " are on one host, but in different network namespaces (net:[" + std::to_string(a.host.network) +
           "] and net:[" + std::to_string(b.host.network) +
           "]), across which their sockets do not connect. Start them in one, such as containers with one --network.";
  const bool first = a.host.boot == 0 || a.host.network == 0;
  return both + " cannot tell whether they are on one host: rank " + std::to_string(first ? rank_a : rank_b) +
         " cannot read /proc/sys/kernel/random/boot_id or /proc/self/ns/net. Mount /proc there, or set PHALANX_HOST_ID "
         "to one value on all ranks of the host.";
}

bool on_another_host(const PeerRecord &self, const PeerRecord &peer) {
  return !why_apart(self, self.rank, peer, peer.rank).empty();
}

std::string process_text(const PeerRecord &self, const PeerRecord &peer) {
  if (!on_another_host(self, peer)) return process_state(peer.pid);
  return "on host " + std::string(peer.hostname, strnlen(peer.hostname, sizeof peer.hostname));
}

void read_hostname(char (*out)[64]) {
  std::memset(*out, 0, sizeof *out);
  // A longer name is cut. gethostname fails only for a name that is too long, and then it has written what fits.
  (void)!gethostname(*out, sizeof *out - 1);
  if ((*out)[0] == '\0') copy_text(*out, sizeof *out, "unknown");
}

std::string socket_name(const Uuid &uuid) {
  char name[64];
  std::snprintf(name, sizeof name, "phalanx-%016" PRIx64 "%016" PRIx64, uuid.high, uuid.low);
  return name;
}

}  // namespace phx
