// What a symmetric allocation in the memory of a device has besides its blocks, as far as a rendezvous needs to know.
// The room that has a driver derives from this.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "world/allocator.h"

namespace phx {

class Group;
class Symm;

// What a rank tells the others of its device. All zero: its block is not in memory of one.
struct DeviceFacts {
  int32_t present;
  int32_t reserved;
  char bytes[136];
};

class SymmDevice {
 public:
  virtual ~SymmDevice() = default;

  virtual DeviceFacts facts() const = 0;
  virtual phx_status export_fd(const char *operation, int *fd) = 0;
  virtual phx_status adopt(const char *operation, int group_rank, const DeviceFacts &facts, int fd) = 0;
  // Once all are there. `all`: by group rank.
  virtual phx_status finish(const char *operation, Group &group, const BlockRef &block, void *const *buffers,
                            const std::vector<DeviceFacts> &all) = 0;
  // Collective. Once all have finished: what the ranks choose together.
  virtual phx_status agree(const char *operation, Group &group, const Block &block, const std::vector<DeviceFacts> &all,
                           const Deadline &deadline) = 0;
  // The allocation is in the group's table, or goes.
  virtual void on_kept(const Symm &symm) = 0;
  virtual void on_gone(const Symm &symm) = 0;
};

// *out stays NULL where the block is in memory that the host reads. `channels`: for the user's kernels. `first`: where
// the counters of this rank's pad begin (Group::first_count).
using MakeSymmDevice = phx_status (*)(const char *operation, const Block &block, int group_size, int group_rank,
                                      uint32_t channels, uint32_t first, std::unique_ptr<SymmDevice> *out);

}  // namespace phx
