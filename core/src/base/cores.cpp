#include "base/cores.h"

#include <sched.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace phx {
namespace {

// A kernel for many cores refuses a mask that is shorter than its own, so longer ones are tried up to this size.
constexpr size_t kMostMaskBytes = size_t{64} << 10;

// Reads quota and period of a control group, in microseconds. False if it has no limit.
bool read_limit(const std::string &directory, bool unified, double *quota, double *period) {
  if (unified) {
    std::ifstream file(directory + "/cpu.max");
    return static_cast<bool>(file >> *quota >> *period) && *quota > 0 && *period > 0;  // "max" is not a number
  }
  std::ifstream quota_file(directory + "/cpu.cfs_quota_us"), period_file(directory + "/cpu.cfs_period_us");
  return static_cast<bool>(quota_file >> *quota) && static_cast<bool>(period_file >> *period) && *quota > 0 &&
         *period > 0;
}

// Applies the limits of a control group and its ancestors, up to the root of the mount, to `out`. Missing directories
// are skipped: a container may see its own control group as the root of the mount, but its path as on the host.
void tighten(const std::string &root, std::string path, bool unified, CpuQuota *out) {
  for (;;) {
    const std::string directory = root + path;
    double quota = 0, period = 0;
    struct stat info;
    if (read_limit(directory, unified, &quota, &period) && stat(directory.c_str(), &info) == 0) {
      const uint32_t cores = static_cast<uint32_t>(std::min(std::max(quota / period, 1.0), 1e6));
      if (out->cores == 0 || cores < out->cores) *out = {cores, info.st_ino};
    }
    if (path.empty()) return;
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

}  // namespace

CoreMask allowed_cores() {
  CoreMask mask;
  for (size_t bytes = sizeof mask; bytes <= kMostMaskBytes; bytes *= 2) {
    std::vector<uint64_t> words(bytes / sizeof(uint64_t));
    auto *const set = reinterpret_cast<cpu_set_t *>(words.data());
    if (sched_getaffinity(0, bytes, set) == 0)
      for (size_t core = 0; core < 8 * bytes; ++core)
        if (CPU_ISSET_S(core, bytes, set)) mask.set(core % mask.size());
    if (mask.any() || errno != EINVAL) break;
  }
  return mask;
}

CpuQuota cpu_quota(const char *membership, const char *mount) {
  CpuQuota quota;
  std::ifstream file(membership);
  for (std::string line; std::getline(file, line);) {  // "0::/path", or "4:cpu,cpuacct:/path" in version 1
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    if (controllers.empty()) tighten(mount, path, true, &quota);
    std::istringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');)
      if (name == "cpu") tighten(std::string(mount) + "/cpu", path, false, &quota);
  }
  return quota;
}

}  // namespace phx
