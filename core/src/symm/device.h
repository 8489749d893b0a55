// The interface by which a rendezvous sets up the parts of a symmetric allocation in device memory other than its
// blocks. GpuSymm in gpu/ implements it.
#pragma once

#include <cstdint>
#include <memory>

#include "base/deadline.h"
#include "world/allocator.h"

namespace phx {

class Group;
class Symm;

// The description of its device that a rank sends to the others. All zero if there is no SymmDevice.
struct DeviceFacts {
  int32_t present;
  int32_t reserved;
  char bytes[136];
};

class SymmDevice {
 public:
  virtual ~SymmDevice() = default;

  virtual DeviceFacts facts() = 0;
  virtual phx_status export_fd(const char *operation, int *fd) = 0;
  virtual phx_status adopt(const char *operation, int group_rank, const DeviceFacts &facts, int fd) = 0;
  // Called once all other ranks are adopted.
  virtual phx_status finish(const char *operation, Group &group, const BlockRef &block, void *const *buffers) = 0;
  // Collective. Called once all ranks have finished, to make the choices that must be the same on all.
  virtual phx_status agree(const char *operation, Group &group, const Block &block, const Deadline &deadline) = 0;
  // Called when the allocation has entered the group's table, and when it is destroyed.
  virtual void on_kept(const Symm &symm) = 0;
  virtual void on_gone(const Symm &symm) = 0;
};

// *out stays NULL unless the block comes from phalanx's CUDA allocator. `channels`: the signal channels for the user's
// kernels. `first`: the initial value of the counters of this rank's pad (Group::first_count).
using MakeSymmDevice = phx_status (*)(const char *operation, const Block &block, int group_size, int group_rank,
                                      uint32_t channels, uint32_t first, std::unique_ptr<SymmDevice> *out);

}  // namespace phx
