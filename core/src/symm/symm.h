// A symmetric allocation of one group: the mapped blocks of all ranks, and a signal pad for each rank.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "base/deadline.h"
#include "group/history.h"
#include "symm/pads.h"
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

// The interface by which a rendezvous sets up the parts of an allocation in device memory other than its blocks.
// GpuSymm in gpu/ implements it.
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

// The ranges of one Symm: each maps the same part of every rank's block a second time, one after another, as one
// contiguous range. Mapping one costs as much as touching all its pages, so the last few stay mapped.
class GatheredRanges {
 public:
  ~GatheredRanges();

  // Maps `bytes`, which are whole pages, at `offset` of each of `blocks`, or returns the existing range of that part.
  phx_status map(const char *operation, void *const *blocks, size_t count, size_t offset, size_t bytes, void **out);
  phx_status unmap(const char *operation, const void *pointer);  // to be called once for each `map`
  // Whether a range of exactly this part begins at `pointer`.
  bool begins(const void *pointer, size_t offset, size_t bytes);

 private:
  struct Range {
    char *base;
    size_t offset;
    size_t bytes;  // of one rank
    size_t all;    // of all ranks
    size_t users;
  };
  void leave_idle(size_t most);

  std::mutex mutex_;
  std::list<Range> ranges_;  // the most recently used one comes first
};

}  // namespace phx

struct phx_symm {
  phx::Symm *symm;
};

namespace phx {

// In device memory, these entries of each rank lie after its pad. They describe the collectives that it has enqueued on
// a stream, with which a rank that enqueues later compares its own. Calls of a peer that is further ahead are not
// compared.
constexpr uint64_t kCallEntries = 64;

class Symm : public std::enable_shared_from_this<Symm> {
 public:
  ~Symm();
  // Collective. The caller holds the turn of SymmTable::mutex.
  static phx_status rendezvous(Group &group, const BlockRef &block, const Deadline &deadline,
                               std::shared_ptr<Symm> *out);

  Group &group() const { return *group_; }
  const Block &block() const { return *block_; }
  uint64_t ordinal() const { return ordinal_; }
  // members() identifies the processes that share the allocation, and key() the allocation among all that they share.
  // Both are the same on all ranks.
  uint64_t members() const { return members_; }
  uint64_t key() const { return key_; }
  int size() const { return static_cast<int>(buffers_.size()); }
  int group_rank() const { return self_; }
  uint32_t channels() const { return channels_; }
  uint32_t pad_stride() const { return pad_stride_of(channels_); }
  char *buffer(int group_rank) const { return static_cast<char *>(buffers_[group_rank]); }
  uint32_t *pad(int group_rank) const { return static_cast<uint32_t *>(pads_[group_rank]); }
  void *const *buffers() const { return buffers_.data(); }
  void *const *pads() const { return pads_.data(); }
  SymmDevice *device() const { return device_.get(); }  // NULL unless the block comes from phalanx's CUDA allocator
  GatheredRanges &gathered() { return gathered_; }
  // Whether no rank has freed its part yet, as far as this rank can see.
  bool is_everywhere() const;
  // Keeps other threads from enqueuing calls on this allocation, so that numbers follow the order of the streams.
  [[nodiscard]] std::unique_lock<std::mutex> order_calls() { return std::unique_lock<std::mutex>(launch_mutex_); }
  // Compares the collective of that number, which this rank is about to enqueue on a stream, with those of ranks that
  // were earlier. Number 0: the one after the last. The caller holds the lock of order_calls.
  phx_status compare(const char *operation, const CallRecord &record, uint64_t number = 0);

  phx_status check(const char *operation, int group_rank, uint32_t channel) const;
  // `operation`: what errors name.
  phx_status put_signal(int group_rank, uint32_t channel, const char *operation = "symm_put_signal");
  phx_status wait_signal(int group_rank, uint32_t channel, int64_t timeout_ms,
                         const char *operation = "symm_wait_signal");
  uint32_t signals(int group_rank, uint32_t channel) const;  // that have come and were not taken
  phx_status barrier(uint32_t channel, int64_t timeout_ms);

  // The C handle: one per Symm, counted. While there are references, it keeps this object and its group alive.
  phx_symm *handle();  // adds a reference
  void drop_handle();

 private:
  Symm(Group &group, BlockRef block, uint64_t ordinal);

  friend struct Rendezvous;
  uint64_t number() const { return ordinal_ + 1; }  // how many rendezvous the group has begun, up to this one
  Pads &pads_of_group() const;
  void adopt_pad(int of, Pads::Pad pad);
  void begin_at(uint32_t first);  // sets the counters of this rank's pad, before any peer maps it
  SharedWord &signal_word(int pad_of, uint32_t channel, int from) const;
  SharedWord &barrier_word(int of, uint32_t channel) const;
  bool has_arrived(uint32_t channel, int peer) const;  // at the barrier that this rank is in
  int first_late(uint32_t channel, int otherwise) const;
  HistoryEntry &call_entry(int of, uint64_t sequence) const;
  SharedWord &sleepers(int of) const { return pad_segments_[of].header().sleepers; }
  phx_status raise(WaitResult result, const char *operation, uint32_t channel, int group_rank,
                   int64_t timeout_ms) const;

  Group *const group_;
  const BlockRef block_;
  const uint64_t ordinal_;
  const uint64_t members_;
  const uint64_t key_;
  const int self_;
  const uint32_t channels_;
  std::vector<std::shared_ptr<void>> imported_;  // the blocks of the peers, which the last reference unmaps
  std::vector<Pads::Pad> pad_segments_;
  bool complete_ = false;  // the rendezvous succeeded on all ranks
  std::vector<void *> buffers_;
  std::vector<void *> pads_;
  std::unique_ptr<SymmDevice> device_;  // declared after what its kernels use, so destroyed before it
  GatheredRanges gathered_;

  std::vector<SharedWord> consumed_;  // signals consumed, by [channel * size + sender]
  struct Barrier {
    TurnMutex mutex;
    uint32_t epoch = 0;
    bool pending = false;  // this rank arrived, but its wait failed: the next call resumes it
  };
  std::vector<Barrier> barriers_;  // by channel

  std::mutex launch_mutex_;
  uint64_t launches_ = 0;  // collectives enqueued on streams

  std::mutex handle_mutex_;
  int64_t handle_count_ = 0;
  phx_symm handle_{this};
  std::pair<std::shared_ptr<Group>, std::shared_ptr<Symm>> kept_;  // the Symm is destroyed first, for it uses the group
};

}  // namespace phx
