// The parts of a symmetric allocation on GPUs besides its blocks: signal pads in the memory of each rank's GPU, lists
// of addresses that kernels read, and the launches of this rank.
#pragma once

#include <vector>

#include "base/shared_memory.h"
#include "base/tuning.h"
#include "gpu/launch.h"
#include "gpu/memory.h"
#include "gpu/multicast.h"
#include "gpu/stream_order.h"
#include "symm/symm.h"

namespace phx {
class Group;
class Workspaces;
}  // namespace phx

namespace phx::cuda {

// What the other ranks must know about this rank's GPU.
struct Facts {
  Uuid uuid;
  int32_t processors;
  int32_t multicast;  // MulticastAbility
  uint64_t unit;      // the granularity of its memory
  GpuTuning apart;    // from the table of that rank, if each rank has a GPU of its own
  GpuTuning shared;   // from the table of that rank, if ranks share GPUs
};
static_assert(sizeof(Facts) <= sizeof DeviceFacts::bytes);

class GpuSymm final : public SymmDevice {
 public:
  static phx_status make(const char *operation, const Block &block, int size, int self, uint32_t channels,
                         uint32_t first, std::unique_ptr<SymmDevice> *out);  // a MakeSymmDevice
  DeviceFacts facts() override;
  phx_status export_fd(const char *operation, int *fd) override { return pads_[self_]->export_fd(operation, fd); }
  phx_status adopt(const char *operation, int rank, const DeviceFacts &facts, int fd) override;
  phx_status finish(const char *operation, Group &group, const BlockRef &block, void *const *buffers) override;
  phx_status agree(const char *operation, Group &group, const Block &block, const Deadline &deadline) override;
  void on_kept(const Symm &symm) override;
  void on_gone(const Symm &symm) override;

  // Why there is no multicast object; empty: there is one.
  const std::string &no_multicast() const { return no_multicast_; }
  // Whether all ranks have kernels that use multicast.
  bool has_multimem() const { return has_multimem_; }

  // The argument for kernels of users: phalanx/device.h.
  const phx_team &team() const { return team_; }
  uint32_t *pad(int rank) const { return static_cast<uint32_t *>(pointer_of(pads_[rank]->pointer())); }
  // Whether kernels can reach the memory at `pointer`.
  bool reaches(const void *pointer) const { return cuda::reaches(driver_, pads_[self_]->gpu(), pointer); }

  // The first of the channels that are reserved for launches of this library.
  uint32_t own_channel() const { return channels_; }
  // The channel for barriers on a user's channel; it is separate from the signals of that channel.
  uint32_t barrier_channel(uint32_t channel) const;
  // The most bytes that an all_reduce by the LL protocol can have: see Line. 0: the group is too large for it.
  size_t line_bytes() const;
  // Puts a kernel of this library on the stream, with as many blocks as `bytes` of work need: the same on all ranks.
  // The caller sets the fields of `launch` that depend on the call, and this function sets the others. `lists`: NULL if
  // the kernel takes none.
  phx_status launch(const char *operation, const std::string &kernel, Launch launch, size_t bytes, const Lists *lists,
                    void *stream);
  // Copies from a block of any rank on the stream, by a copy engine.
  phx_status copy(const char *operation, void *to, const void *from, size_t bytes, void *stream) const {
    return copy_within(operation, driver_, pads_[self_]->gpu(), to, from, bytes, stream);
  }

 private:
  GpuPlace place(bool shared) const { return {pads_[self_]->gpu().name, static_cast<int>(pads_.size()), shared}; }
  GpuSymm(Gpus &gpus, int size, int self, uint32_t channels);
  // The offsets in the memory of a rank's pad, after the words of all channels; the same on all ranks.
  struct Layout {
    size_t parts;
    size_t shown;  // see Inputs
    size_t found;
    size_t lines;
    size_t epochs;
    size_t taken;  // see Launch
    size_t addresses;
    size_t bytes;  // the size of the whole
  };
  static Layout layout_of(size_t size, uint32_t channels);
  phx_status begin_at(const char *operation, uint32_t first) const;
  phx_status count_blocks(const char *operation);
  phx_status make_multicast(const char *operation, Group &group, const Block &block, const Deadline &deadline);

  Gpus &gpus_;
  const Driver &driver_;
  const int self_;
  const uint32_t channels_;
  const Layout layout_;
  int32_t index_ = 0;
  int32_t threads_ = 0;              // of a block
  uint32_t most_blocks_ = 0;         // the same on all ranks
  bool shares_gpus_ = false;         // two ranks use the same GPU
  std::vector<Facts> facts_;         // by group rank
  Workspaces *kept_by_ = nullptr;    // those that list this allocation
  std::vector<MemoryPtr> pads_;      // by group rank
  std::shared_ptr<uint32_t> words_;  // of the group: see GpuGroup::open_words
  MulticastPtr multicast_;
  bool has_multimem_ = false;
  std::string no_multicast_;
  phx_team team_{};
  std::mutex mutex_;
  StreamOrder order_;  // the last member: its destructor waits for the last launch, which ends by its timeout
};

}  // namespace phx::cuda
