// A symmetric allocation of one group: the mapped blocks of all ranks, and a signal pad for each rank.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "base/deadline.h"
#include "base/shared_memory.h"
#include "base/wait.h"
#include "group/control.h"
#include "group/turn.h"
#include "phalanx/phalanx.h"
#include "symm/device.h"
#include "symm/gathered.h"
#include "symm/pads.h"
#include "world/allocator.h"

namespace phx {
class Group;
class Symm;
class World;
}  // namespace phx

struct phx_symm {
  phx::Symm *symm;
};

namespace phx {

// For allocations in device memory: describes a collective that the owner of the pad has enqueued on a stream. These
// lines lie after the pad; a rank that enqueues later compares its own call with them.
struct alignas(kLine) CallLine {
  std::atomic<uint64_t> sequence;  // counts from 1; 0 while the line is written
  std::atomic<uint64_t> words[sizeof(CallRecord) / sizeof(uint64_t)];
};
constexpr uint64_t kCallLines = 64;  // of each rank; calls of a peer that is further ahead are not compared

// A peer's block, mapped into this process and unmapped by the destructor.
class ImportedBlock {
 public:
  ImportedBlock(AllocatorRef allocator, void *base, uint64_t cookie)
      : allocator_(std::move(allocator)), base_(base), cookie_(cookie) {}
  ImportedBlock(const ImportedBlock &) = delete;
  ImportedBlock &operator=(const ImportedBlock &) = delete;
  ~ImportedBlock() { allocator_->ops().unmap(allocator_->self(), base_, cookie_); }
  void *base() const { return base_; }

 private:
  AllocatorRef allocator_;
  void *base_;
  uint64_t cookie_;
};

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
  // Compares collective `number`, which this rank is about to enqueue on a stream, with those of ranks that were
  // earlier.
  phx_status agree(const char *operation, const CallRecord &record, uint64_t number);
  // Whether no rank has freed its part yet, as far as this rank can see.
  bool is_everywhere() const;
  // Keeps other threads from enqueuing calls on this allocation, so that numbers follow the order of the streams.
  class OrderedCalls {
   public:
    explicit OrderedCalls(Symm &symm) : symm_(symm), lock_(symm.launch_mutex_) {}
    phx_status compare(const char *operation, const CallRecord &record) const {
      return symm_.compare(operation, record);
    }

   private:
    Symm &symm_;
    const std::lock_guard<std::mutex> lock_;
  };

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
  size_t pad_segment_bytes() const;
  size_t call_lines_at() const;
  void adopt_pad(int of, const Pads::Location &place, Pads::Pad pad);
  phx_status take_pad(const char *operation, Fd *fd);
  phx_status find_pad(const char *operation, int of, const Pads::Location &place, int fd);
  void begin_at(uint32_t first);  // sets the counters of this rank's pad, before any peer maps it
  SharedWord &signal_word(int pad_of, uint32_t channel, int from) const;
  SharedWord &barrier_word(int of, uint32_t channel) const;
  bool has_arrived(uint32_t channel, int peer) const;  // at the barrier that this rank is in
  int first_late(uint32_t channel, int otherwise) const;
  CallLine &call_line(int of, uint64_t sequence) const;
  phx_status compare(const char *operation, const CallRecord &record);
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
  std::vector<std::unique_ptr<ImportedBlock>> imported_;
  std::vector<Pads::Pad> pad_segments_;
  std::vector<Pads::Location> pad_places_;
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
  std::shared_ptr<Symm> keep_self_;
  std::shared_ptr<Group> keep_group_;
};

}  // namespace phx
