// The protocol of the slots: publish an epoch, await that of every rank, never overwrite a slot that a peer reads.
//
// Why no closing barrier is needed: before a rank fills the slot of epoch e it makes sure (reserve) that every peer is
// `done` with epoch e - kSlots. A blocking collective learns that for free, because each arrival has the peer's `done`.
#pragma once

#include <vector>

#include "group/control.h"
#include "group/history.h"

namespace phx {

#ifdef PHX_UNCHECKED  // only to measure what the checks cost: benchmarks/detection_cost.py
inline constexpr bool kChecked = false;
#else
inline constexpr bool kChecked = true;
#endif

// The result of a wait for all ranks. Packed into one word, which is returned in a register. GCC would write three
// members of a struct to memory one by one and read them back at once, for which the processor has to wait.
class AwaitResult {
 public:
  constexpr AwaitResult() = default;
  // A failure, and the first group rank at fault.
  constexpr AwaitResult(WaitResult failure, int group_rank)
      : bits_(uint64_t{static_cast<uint32_t>(group_rank)} << 32 | static_cast<uint64_t>(failure)) {}
  static constexpr AwaitResult not_staged() { return AwaitResult(kNotStaged); }

  constexpr WaitResult result() const { return static_cast<WaitResult>(bits_ & 0xff); }
  constexpr int group_rank() const { return static_cast<int>(bits_ >> 32); }
  constexpr bool staged() const { return (bits_ & kNotStaged) == 0; }  // whether all slots have their data
  constexpr explicit operator bool() const { return result() == WaitResult::kReached; }

 private:
  static constexpr uint64_t kNotStaged = 0x100;
  constexpr explicit AwaitResult(uint64_t bits) : bits_(bits) {}
  uint64_t bits_ = static_cast<uint64_t>(WaitResult::kReached);
};

class Lane {
 public:
  struct Member {
    char *lane;                               // where its lane begins, mapped as long as this object lives
    const std::atomic<int32_t> *interrupted;  // ends waits for this rank
  };
  void open(const std::vector<Member> &members, int self, const ControlHeader &layout, bool fenced_by_sleepers,
            bool ranks_share_cores, uint32_t first_count);

  size_t slot_bytes() const { return slot_bytes_; }
  // Whether the first `reach` bytes of each slot of this rank are resident; `hold` makes them so. Before its first call
  // a lane has no resident page, except the slot headers of the first lane, so an unused group takes little memory.
  bool holds(size_t reach) const { return reach < held_; }
  phx_status hold(const char *operation, size_t reach);
  int group_rank() const { return self_; }
  int group_size() const { return static_cast<int>(peers_.size()); }
  uint64_t last_epoch() const { return epoch_; }
  bool ranks_share_cores() const { return ranks_share_cores_; }  // the same on all ranks

  char *data(int group_rank, uint64_t epoch) const { return peers_[group_rank].slot(epoch) + sizeof(SlotHeader); }

  // Waits until the slot of the next epoch may be filled.
  AwaitResult reserve(LazyDeadline &deadline) { return has_room() ? AwaitResult() : reserve_slowly(deadline); }
  bool reserve_would_block() const;
  // Makes the slot of the next epoch readable and returns the epoch. `done`: see SlotHeader. `place` says whether the
  // slot is empty. `even`: Operation::even.
  uint64_t publish(const CallRecord &record, uint64_t done, const InputLocation &place, uint64_t even) {
    const uint64_t epoch = ++epoch_;
    const Peer &self = peers_[self_];
    SlotHeader *header = self.header(epoch);
    if (kChecked) header->record = record;
    header->done = static_cast<uint32_t>(done);
    header->place = place;
    header->even = even;
    note_core();
    header->staged.store(static_cast<uint32_t>(epoch - (place.leaves_slot_empty() ? 1 : 0)), std::memory_order_relaxed);
    // Pairs with the acquire in await: a rank that sees the epoch also sees the slot's data and header.
    store_and_wake(header->epoch, static_cast<uint32_t>(epoch), self.control->sleepers, fenced_by_sleepers_);
    return epoch;
  }
  // Waits until every rank has published `epoch`, and compares the records.
  AwaitResult await(uint64_t epoch, const CallRecord &record, LazyDeadline &deadline) {
    if (ranks_share_cores_)
      if (const AwaitResult first = await_this_core(epoch, deadline); !first) return first;
    const uint32_t target = static_cast<uint32_t>(epoch);
    uint32_t done = target;  // by all others
    bool staged = true;
    for (int i = 0; i < group_size(); ++i) {
      if (i == self_) continue;
      const SlotHeader *const header = peers_[i].header(epoch);
      if (const WaitResult result = arrival(i, header, target, deadline); result != WaitResult::kReached)
        return {result, i};
      if (kChecked && !(header->record == record)) return {WaitResult::kMismatch, i};
      if (reached(done, header->done)) done = header->done;
      if (!reached(header->staged.load(std::memory_order_acquire), target)) staged = false;
    }
    if (reached(done + kSlots, room_)) room_ = done + kSlots;
    return staged ? AwaitResult() : AwaitResult::not_staged();
  }
  bool await_would_block(uint64_t epoch) const;
  bool arrived(uint64_t epoch, int group_rank) const;
  // The first late rank, for the text of an error; `otherwise` if all have arrived by now.
  int first_late(uint64_t epoch, int otherwise) const;
  // To be called when the slot of an epoch that was published empty has its data.
  void publish_staged(uint64_t epoch);
  // Waits until every rank has staged its slot. All of them must have arrived before.
  AwaitResult await_staged(uint64_t epoch, LazyDeadline &deadline);
  bool staging_would_block(uint64_t epoch) const;
  // Tells peers that this rank has read everything up to `epoch`.
  void publish_done(uint64_t epoch) {
    LaneHeader *const control = peers_[self_].control;
    control->done.store(static_cast<uint32_t>(epoch), std::memory_order_release);
    // Relaxed on purpose: only a rank with kSlots collectives in flight waits for this, and it checks again within a
    // slice.
    if (control->sleepers.load(std::memory_order_relaxed) != 0) wake_all(control->done);
  }

  // The record that a rank published for `epoch`; valid after its arrival.
  const CallRecord &record(int group_rank, uint64_t epoch) const { return peers_[group_rank].header(epoch)->record; }
  const InputLocation &place(int group_rank, uint64_t epoch) const { return peers_[group_rank].header(epoch)->place; }
  uint64_t even(int group_rank, uint64_t epoch) const { return peers_[group_rank].header(epoch)->even; }
  uint32_t done_of(int group_rank) const { return peers_[group_rank].control->done.load(std::memory_order_acquire); }
  History &history() { return history_; }    // of this rank
  History history_of(int group_rank) const;  // empty before `open`
  void wake_waiters() const;                 // of this process and others, on any word of this lane
  void note_core() const {                   // for ranks that wait for this one, if ranks share cores
    if (!ranks_share_cores_) return;
    const uint32_t core = current_core();
    SharedWord &noted = peers_[self_].control->core;
    if (noted.load(std::memory_order_relaxed) != core) noted.store(core, std::memory_order_relaxed);
  }
  const SharedWord *core_of(int group_rank) const { return &peers_[group_rank].control->core; }
  // Whether to wait for that rank before others: it was last on this core, and cannot arrive while this rank runs
  // there. When this rank gets the core back, the other ranks have usually arrived as well. Spinning for one of them
  // first would only keep that rank off the core.
  bool comes_first(int group_rank) const {
    return ranks_share_cores_ && group_rank != self_ && runs_on_this_core(core_of(group_rank));
  }
  int spins() const { return spins_; }  // for ranks that do not come first

 private:
  struct Peer {
    LaneHeader *control = nullptr;
    const std::atomic<int32_t> *interrupted = nullptr;
    size_t stride = 0;
    char *slots() const { return reinterpret_cast<char *>(control + 1); }
    char *slot(uint64_t epoch) const { return slots() + (epoch % kSlots) * stride; }
    SlotHeader *header(uint64_t epoch) const { return reinterpret_cast<SlotHeader *>(slot(epoch)); }
    char *history() const { return slots() + kSlots * stride; }
    bool is_interrupted() const { return interrupted->load(std::memory_order_acquire) != 0; }
  };

  // Whether the slot of the next epoch may be filled, as far as this rank knows.
  bool has_room() const { return reached(room_, static_cast<uint32_t>(epoch_ + 1)); }
  AwaitResult reserve_slowly(LazyDeadline &deadline);
  WaitResult arrival(int group_rank, const SlotHeader *header, uint32_t target, LazyDeadline &deadline) const {
    const Peer &peer = peers_[group_rank];
    return wait_reached(header->epoch, target, peer.control->sleepers, *peer.interrupted, deadline, core_of(group_rank),
                        spins_);
  }
  AwaitResult await_this_core(uint64_t epoch, LazyDeadline &deadline) const;

  std::atomic<bool> open_{false};  // the monitor's thread may use this object before `open` has ended
  std::vector<Peer> peers_;
  int self_ = 0;
  size_t slot_bytes_ = 0;
  size_t held_ = 0;  // one more than the bytes of each own slot that are resident; 0: not even the headers are
  bool fenced_by_sleepers_ = false;
  bool ranks_share_cores_ = false;
  int spins_ = kFewSpins;
  History history_;
  uint64_t epoch_ = 0;  // the last one published
  uint32_t room_ = 0;   // the last one whose slot may be filled, as far as this rank knows
};

}  // namespace phx
