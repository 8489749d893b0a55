// Which cores this process may use, and how much of their time.
#pragma once

#include <bitset>
#include <cstdint>

namespace phx {

// One bit for each core; those from 4096 on share the bits of the first ones.
using CoreMask = std::bitset<4096>;
CoreMask allowed_cores();  // of the calling thread; no bits if the kernel does not tell

// The CPU limit of the tightest control group of this process, which all processes in that group share.
struct CpuQuota {
  uint32_t cores = 0;    // rounded down, at least 1; 0: no limit
  uint64_t granted = 0;  // identifies that control group on this host
};
// Tests pass files of their own in place of the kernel's.
CpuQuota cpu_quota(const char *membership = "/proc/self/cgroup", const char *mount = "/sys/fs/cgroup");

}  // namespace phx
