// Which cores this process may use, and how much time of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace phx {

// One bit for each core; those from 4096 on share the bits of the first ones.
using CoreMask = std::array<uint64_t, 64>;
CoreMask allowed_cores();  // of the calling thread; none where the kernel does not tell
size_t count_cores(const CoreMask &mask);

// The time that the tightest of the control groups of this process grants to all processes in it together.
struct CpuQuota {
  uint32_t cores = 0;    // whole ones, at least 1; 0: no limit
  uint64_t granted = 0;  // identifies that control group on this host
};
// The files of the kernel by other names: for tests.
CpuQuota cpu_quota(const char *membership = "/proc/self/cgroup", const char *mount = "/sys/fs/cgroup");

}  // namespace phx
