// The protocol of the slots: publish an epoch, await everybody's, and never overwrite what a peer still reads.
//
// Why no closing barrier is needed: before a rank fills the slot of epoch e it makes sure (reserve) that every peer is
// `done` with epoch e - kSlots. A blocking collective learns that for free, because each arrival carries the peer's
// done.
#pragma once

#include <vector>

#include "base/wait.h"
#include "group/control.h"
#include "group/history.h"

namespace phx {

enum class AwaitFailure { kNone, kInterrupted, kTimeout, kMismatch };

// In one word, which is returned in a register: of a struct of three members GCC writes each to memory and reads the
// whole back at once, for which the processor has to wait.
class AwaitResult {
 public:
  constexpr AwaitResult() = default;
  // The first group rank at fault.
  constexpr AwaitResult(AwaitFailure failure, int group_rank)
      : bits_(uint64_t{static_cast<uint32_t>(group_rank)} << 32 | static_cast<uint64_t>(failure)) {}
  static constexpr AwaitResult not_staged() { return AwaitResult(kNotStaged); }

  constexpr AwaitFailure failure() const { return static_cast<AwaitFailure>(bits_ & 0xff); }
  constexpr int group_rank() const { return static_cast<int>(bits_ >> 32); }
  constexpr bool staged() const { return (bits_ & kNotStaged) == 0; }  // whether all slots have their data
  constexpr explicit operator bool() const { return failure() == AwaitFailure::kNone; }

 private:
  static constexpr uint64_t kNotStaged = 0x100;
  constexpr explicit AwaitResult(uint64_t bits) : bits_(bits) {}
  uint64_t bits_ = 0;
};

class Lane {
 public:
  // lanes[i]: where rank i's lane begins, mapped as long as this object lives. interruptions[i] ends waits for rank i.
  void open(const std::vector<char *> &lanes, int self, size_t slot_bytes, uint32_t recorder_entries,
            const std::atomic<int32_t> *interruptions, bool fenced_by_sleepers, bool ranks_share_cores,
            uint32_t first_count = 0);

  size_t slot_bytes() const { return slot_bytes_; }
  // Whether the first `reach` bytes of every own slot are resident; `hold` makes them so. Nothing of a lane is before
  // its first call, so that a group costs memory only as far as it is used.
  bool holds(size_t reach) const { return reach < held_; }
  phx_status hold(const char *operation, size_t reach);
  int group_rank() const { return self_; }
  int group_size() const { return static_cast<int>(peers_.size()); }
  uint64_t last_epoch() const { return epoch_; }
  bool ranks_share_cores() const { return ranks_share_cores_; }  // as all ranks see it

  char *data(int group_rank, uint64_t epoch) const { return peers_[group_rank].slot(epoch) + sizeof(SlotHeader); }

  // Waits until the slot of the next epoch may be filled.
  AwaitResult reserve(LazyDeadline &deadline);
  bool reserve_would_block() const;
  // Makes the slot of the next epoch readable and returns the epoch. `done`: see SlotHeader. `place` says whether the
  // slot is empty.
  uint64_t publish(const CallRecord &record, uint64_t done, const InputLocation &place);
  // Waits for everybody's publication of `epoch`; compares the records.
  AwaitResult await(uint64_t epoch, const CallRecord &record, LazyDeadline &deadline);
  bool await_would_block(uint64_t epoch) const;
  bool arrived(uint64_t epoch, int group_rank) const;
  // The first late rank, for the text of an error; `otherwise` where all have arrived by now.
  int first_late(uint64_t epoch, int otherwise) const;
  // The slot of an epoch that was published empty has its data now.
  void publish_staged(uint64_t epoch);
  // Waits until every rank has staged its slot. All of them must have arrived before.
  AwaitResult await_staged(uint64_t epoch, LazyDeadline &deadline);
  bool staging_would_block(uint64_t epoch) const;
  // Tells peers that this rank has read everything up to `epoch`.
  void publish_done(uint64_t epoch);

  // What a rank published for `epoch`; valid after its arrival.
  const CallRecord &record(int group_rank, uint64_t epoch) const { return peers_[group_rank].header(epoch)->record; }
  const InputLocation &place(int group_rank, uint64_t epoch) const { return peers_[group_rank].header(epoch)->place; }
  uint32_t done_of(int group_rank) const { return peers_[group_rank].control->done.load(std::memory_order_acquire); }
  History &history() { return history_; }    // of this rank
  History history_of(int group_rank) const;  // empty before `open`
  void wake_waiters() const;                 // of this process and others, on any word of this lane
  void note_core() const;                    // for those who wait for this rank, if ranks share cores
  const SharedWord *core_of(int group_rank) const { return &peers_[group_rank].control->core; }
  // Whether to wait for that rank before others: it is on this core and cannot arrive as long as this rank has it. Once
  // it is back the others are there, too, for most of the time; to spin for one of them first would only take it.
  bool comes_first(int group_rank) const {
    return ranks_share_cores_ && group_rank != self_ && is_here(core_of(group_rank));
  }
  int spins() const { return spins_; }  // for ranks that did not come first

 private:
  struct Peer {
    LaneHeader *control = nullptr;
    char *slots = nullptr;
    size_t stride = 0;
    uint32_t known_done = 0;
    char *slot(uint64_t epoch) const { return slots + (epoch % kSlots) * stride; }
    SlotHeader *header(uint64_t epoch) const { return reinterpret_cast<SlotHeader *>(slot(epoch)); }
  };

  std::atomic<bool> open_{false};  // the monitor's thread may look before `open` is through
  std::vector<Peer> peers_;
  int self_ = 0;
  size_t slot_bytes_ = 0;
  size_t held_ = 0;  // one more than the bytes of each own slot that are resident; 0: not even the headers are
  bool fenced_by_sleepers_ = false;
  bool ranks_share_cores_ = false;
  int spins_ = kFewSpins;
  History history_;
  uint64_t epoch_ = 0;  // the last one published
  const std::atomic<int32_t> *interruptions_ = nullptr;
};

}  // namespace phx
