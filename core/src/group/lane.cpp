#include "group/lane.h"

#include <algorithm>

#include "base/error.h"
#include "base/shared_memory.h"

namespace phx {
namespace {

constexpr size_t kLeastHeld = size_t{4} << 10;

}  // namespace

// The owner calls it before it publishes, so the pages come from its NUMA node, and peers, for which the pages exist
// already, map many with each fault.
phx_status Lane::hold(const char *operation, size_t reach) {
  const Peer &self = peers_[self_];
  size_t wanted = std::min(kLeastHeld, slot_bytes_);
  while (wanted < std::min(reach, slot_bytes_)) wanted = std::min(2 * wanted, slot_bytes_);
  const bool is_new = held_ == 0;
  const size_t from = is_new ? 0 : sizeof(SlotHeader) + held_ - 1;
  const size_t to = sizeof(SlotHeader) + wanted;
  if (is_new) {  // the header of the lane lies before the first slot
    PHX_TRY(populate(operation, self.control, sizeof(LaneHeader)));
    PHX_TRY(populate(operation, self.history(), history_.count() * sizeof(HistoryEntry)));
  }
  for (uint64_t slot = 0; slot < kSlots; ++slot) PHX_TRY(populate(operation, self.slot(slot) + from, to - from));
  held_ = wanted == slot_bytes_ ? SIZE_MAX : wanted + 1;
  return PHX_OK;
}

void Lane::open(const std::vector<Member> &members, int self, const ControlHeader &layout, bool fenced_by_sleepers,
                bool ranks_share_cores, uint32_t first_count) {
  self_ = self;
  slot_bytes_ = layout.slot_bytes;
  fenced_by_sleepers_ = fenced_by_sleepers;
  ranks_share_cores_ = ranks_share_cores;
  spins_ = ranks_share_cores ? spins_of_a_turn() : kFewSpins;
  epoch_ = first_count;
  room_ = first_count + kSlots;
  for (const Member &member : members)
    peers_.push_back({reinterpret_cast<LaneHeader *>(member.lane), member.interrupted, layout.slot_stride()});
  history_ = History(peers_[self].history(), layout.recorder_entries);
  open_.store(true, std::memory_order_release);
}

History Lane::history_of(int group_rank) const {
  if (!open_.load(std::memory_order_acquire)) return {};
  return History(peers_[group_rank].history(), history_.count());
}

AwaitResult Lane::reserve_slowly(LazyDeadline &deadline) {
  const uint32_t needed = static_cast<uint32_t>(epoch_ + 1 - kSlots);
  uint32_t done = static_cast<uint32_t>(epoch_);  // by all others
  for (int i = 0; i < group_size(); ++i) {
    if (i == self_) continue;
    const Peer &peer = peers_[i];
    const WaitResult result =
        wait_reached(peer.control->done, needed, peer.control->sleepers, *peer.interrupted, deadline, core_of(i));
    if (result != WaitResult::kReached) return {result, i};
    if (const uint32_t of_peer = done_of(i); reached(done, of_peer)) done = of_peer;
  }
  room_ = done + kSlots;
  return {};
}

bool Lane::reserve_would_block() const {
  if (has_room()) return false;
  const uint32_t needed = static_cast<uint32_t>(epoch_ + 1 - kSlots);
  for (int i = 0; i < group_size(); ++i)
    if (i != self_ && !reached(done_of(i), needed)) return !peers_[i].is_interrupted();
  return false;
}

// Waits for the ranks that come first.
AwaitResult Lane::await_this_core(uint64_t epoch, LazyDeadline &deadline) const {
  for (int i = 0; i < group_size(); ++i) {
    if (!comes_first(i)) continue;
    const WaitResult result = arrival(i, peers_[i].header(epoch), static_cast<uint32_t>(epoch), deadline);
    if (result != WaitResult::kReached) return {result, first_late(epoch, i)};
  }
  return {};
}

void Lane::publish_staged(uint64_t epoch) {
  Peer &self = peers_[self_];
  store_and_wake(self.header(epoch)->staged, static_cast<uint32_t>(epoch), self.control->sleepers, fenced_by_sleepers_);
}

AwaitResult Lane::await_staged(uint64_t epoch, LazyDeadline &deadline) {
  for (int i = 0; i < group_size(); ++i) {
    if (i == self_) continue;
    const Peer &peer = peers_[i];
    const WaitResult result = wait_reached(peer.header(epoch)->staged, static_cast<uint32_t>(epoch),
                                           peer.control->sleepers, *peer.interrupted, deadline, core_of(i));
    if (result != WaitResult::kReached) return {result, i};
  }
  return {};
}

bool Lane::staging_would_block(uint64_t epoch) const {
  for (int i = 0; i < group_size(); ++i)
    if (i != self_ &&
        !reached(peers_[i].header(epoch)->staged.load(std::memory_order_acquire), static_cast<uint32_t>(epoch)))
      return !peers_[i].is_interrupted();
  return false;
}

int Lane::first_late(uint64_t epoch, int otherwise) const {
  for (int i = 0; i < group_size(); ++i)
    if (i != self_ && !arrived(epoch, i)) return i;
  return otherwise;
}

bool Lane::arrived(uint64_t epoch, int group_rank) const {
  return reached(peers_[group_rank].header(epoch)->epoch.load(std::memory_order_acquire), static_cast<uint32_t>(epoch));
}

bool Lane::await_would_block(uint64_t epoch) const {
  for (int i = 0; i < group_size(); ++i)
    if (i != self_ && !arrived(epoch, i)) return !peers_[i].is_interrupted();
  return false;
}

void Lane::wake_waiters() const {
  // A peer may die while the group is being created. No thread can wait on this lane before that is done.
  if (!open_.load(std::memory_order_acquire)) return;
  for (const Peer &peer : peers_) {
    // A thread that increments `sleepers` after this load sees the interruption within a slice of its sleep.
    if (peer.control->sleepers.load(std::memory_order_seq_cst) == 0) continue;
    wake_all(peer.control->done);
    for (uint64_t slot = 0; slot < kSlots; ++slot) {
      wake_all(peer.header(slot)->epoch);
      wake_all(peer.header(slot)->staged);
    }
  }
}

}  // namespace phx
