// The identity of a rank: its process, its host, and the record by which peers find it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/build.h"

namespace phx {

struct Uuid {
  uint64_t high = 0;
  uint64_t low = 0;
  bool operator==(const Uuid &other) const { return high == other.high && low == other.low; }
  bool operator!=(const Uuid &other) const { return !(*this == other); }
  bool operator<(const Uuid &other) const { return high != other.high ? high < other.high : low < other.low; }
};

Uuid random_uuid();   // from the kernel's generator: not guessable
Uuid process_uuid();  // of this process; another one after a fork

// By what ranks can tell whether they share a host. Zero: it could not be read, as where /proc is not mounted.
struct HostFacts {
  uint64_t boot;     // a hash of the kernel's boot id
  uint64_t network;  // the inode of the network namespace
};
HostFacts read_host_facts();
// Equal on two ranks exactly if they run under one kernel and in one network namespace (abstract sockets are per
// namespace).
uint64_t host_id_of(const HostFacts &facts);

// Start time of a process in clock ticks after boot, 0 if it cannot be read. With the pid it names one process for
// ever.
uint64_t process_start_time(int32_t pid);
// "running", "sleeping", "stopped", "exiting", "zombie", "gone" or "unknown".
const char *process_state(int32_t pid);
// Whether it is exiting, a zombie or gone. Its sockets close while it is exiting: on a busy host long before the rest.
bool process_has_ended(int32_t pid);

// Where a world accepts ranks of other hosts. Family 0: nowhere.
struct HostAddress {
  uint16_t family;  // AF_INET or AF_INET6
  uint16_t port;
  uint8_t ip[16];  // in network order; an IPv4 address is the first four bytes
};

// What a rank publishes in the store. Builds that differ read it of each other as far as `uuid`: nothing before that
// may ever change its place. All that comes later is read by equal builds only.
struct PeerRecord {
  char magic[8];
  Build build;
  int32_t rank;
  int32_t pid;
  uint64_t host_id;
  Uuid uuid;  // of the world; also the name of its socket
  HostFacts host;
  uint64_t start_time;
  uint32_t uid;
  uint32_t host_given;  // 1: host_id is what the caller gave, by phx_world_params
  Uuid token;           // a process that shows it has read the store
  Uuid process;         // in which the world is
  char hostname[64];    // for errors; ends with a zero byte
  HostAddress address;  // the record of a world has none; its groups fill in World::address()
  uint32_t unused;      // zero
};
inline constexpr char kPeerMagic[8] = {'P', 'H', 'X', 'P', 'E', 'E', 'R', '3'};
inline constexpr size_t kPeerPrefix = offsetof(PeerRecord, host);
static_assert(kPeerPrefix == 72);
static_assert(sizeof(PeerRecord) == 224);

// Why two ranks, of these records, cannot share memory; empty if they can. The same text on whichever rank asks.
std::string why_apart(const PeerRecord &a, int rank_a, const PeerRecord &b, int rank_b);
// Whether why_apart has a reason: then the two connect over TCP. The pid of such a peer means nothing to this host.
bool on_another_host(const PeerRecord &self, const PeerRecord &peer);
// "running" and so on for a rank of this host; "on host NAME" for one of another host.
std::string process_text(const PeerRecord &self, const PeerRecord &peer);
// The name of this host for PeerRecord::hostname.
void read_hostname(char (*out)[64]);

// Name of the abstract socket on which the world `uuid` listens (without the leading zero byte).
std::string socket_name(const Uuid &uuid);

}  // namespace phx
