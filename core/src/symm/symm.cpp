// A symmetric allocation: its signals, its barriers, and the life of its handle.

#include "base/hash.h"
#include "symm/table.h"

namespace phx {
namespace {

uint64_t key_of(const Group &group, uint64_t ordinal) {
  const uint64_t facts[2] = {group.id(), ordinal};
  return hash_bytes(facts, sizeof facts) | 1;  // never 0
}

}  // namespace

Symm::Symm(Group &group, BlockRef block, uint64_t ordinal)
    : group_(&group),
      block_(std::move(block)),
      ordinal_(ordinal),
      members_(group.members()),
      key_(key_of(group, ordinal)),
      self_(group.group_rank()),
      channels_(group.world().signal_channels()),
      imported_(group.size()),
      pad_segments_(group.size()),
      buffers_(group.size()),
      pads_(group.size()),
      consumed_(static_cast<size_t>(channels_) * group.size()),
      barriers_(channels_) {
  buffers_[self_] = block_->base;
  for (SharedWord &consumed : consumed_) consumed.store(group.first_count(), std::memory_order_relaxed);
  for (Barrier &barrier : barriers_) barrier.epoch = group.first_count();
}

Symm::~Symm() {
  SymmDirectory::of_process().remove(this);
  if (complete_) {
    // Pairs with the load in Pads::collect: after this store, this rank touches nothing of the allocation.
    pad_segments_[self_].header().freed.store(number(), std::memory_order_release);
    pads_of_group().retire(number(), pad_segments_);
  } else if (pad_segments_[self_].segment) {
    pads_of_group().give_back(pad_segments_[self_].place);
  }
  if (device_ != nullptr) device_->on_gone(*this);
}

bool Symm::is_everywhere() const {
  // relaxed, because this is a hint: a caller that does not see the newest value finds out in the kernel.
  return std::none_of(pad_segments_.begin(), pad_segments_.end(), [this](const Pads::Pad &pad) {
    return pad.header().freed.load(std::memory_order_relaxed) >= number();
  });
}

Pads &Symm::pads_of_group() const { return symms_of(*group_).pads(block_->on_device()); }

void Symm::adopt_pad(int of, Pads::Pad pad) {
  pads_[of] = pad.begin + sizeof(PadHeader) + channels_ * sizeof(BarrierLine);
  pad_segments_[of] = std::move(pad);
}

void Symm::begin_at(uint32_t first) {
  for (uint32_t channel = 0; channel < channels_; ++channel) {
    barrier_word(self_, channel).store(first, std::memory_order_relaxed);
    for (int from = 0; from < size(); ++from) signal_word(self_, channel, from).store(first, std::memory_order_relaxed);
  }
}

SharedWord &Symm::signal_word(int pad_of, uint32_t channel, int from) const {
  return static_cast<SharedWord *>(pads_[pad_of])[static_cast<size_t>(from) * pad_stride() + channel];
}

SharedWord &Symm::barrier_word(int of, uint32_t channel) const {
  return reinterpret_cast<BarrierLine *>(pad_segments_[of].begin + sizeof(PadHeader))[channel].epoch;
}

phx_status Symm::check(const char *operation, int group_rank, uint32_t channel) const {
  if (group_rank < 0 || group_rank >= size())
    return fail(PHX_ERR_INVALID, operation, "group_rank is %d, but the group has %d ranks, numbered from 0", group_rank,
                size());
  if (channel >= channels_)
    return fail(PHX_ERR_INVALID, operation,
                "channel is %u, but this allocation has channels 0 to %u; raise phx_world_params.signal_channels",
                channel, channels_ - 1);
  return PHX_OK;
}

phx_status Symm::raise(WaitResult result, const char *operation, uint32_t channel, int group_rank,
                       int64_t timeout_ms) const {
  if (result == WaitResult::kInterrupted) return group_->raise_revoked(operation);
  if (interrupt_requested()) return group_->raise_interrupted(operation);
  return fail_text(PHX_ERR_TIMEOUT, operation,
                   "%s on group '%s', channel %u: %s: rank %d still waits for %s. The call may be tried again. %s",
                   operation, group_->name().c_str(), channel, group_->timed_out(timeout_ms).c_str(),
                   group_->self_rank(), group_->describe(group_rank).c_str(), group_->advice(group_rank).c_str())
      .peer(group_->rank_of(group_rank));
}

phx_status Symm::put_signal(int group_rank, uint32_t channel, const char *operation) {
  PHX_TRY(check(operation, group_rank, channel));
  if (group_->interruption(group_rank).load(std::memory_order_acquire) != 0) return group_->raise_revoked(operation);
  SharedWord &word = signal_word(group_rank, channel, self_);
  // One rank writes the word, but perhaps several of its threads. seq_cst: release for the data, and see
  // store_and_wake.
  word.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers(group_rank).load(std::memory_order_seq_cst) != 0) wake_all(word);
  return PHX_OK;
}

uint32_t Symm::signals(int group_rank, uint32_t channel) const {
  return signal_word(self_, channel, group_rank).load(std::memory_order_acquire) -
         consumed_[static_cast<size_t>(channel) * size() + group_rank].load(std::memory_order_relaxed);
}

phx_status Symm::wait_signal(int group_rank, uint32_t channel, int64_t timeout_ms, const char *operation) {
  PHX_TRY(check(operation, group_rank, channel));
  // The state of the group is not checked first: a signal that has arrived can be consumed, whatever happened since.
  SharedWord &consumed = consumed_[static_cast<size_t>(channel) * size() + group_rank];
  LazyDeadline deadline(timeout_ms, &group_->world().progress());
  const auto text = [&] { return group_->still_waiting(operation, 0, {group_rank}); };
  deadline.set_text(WaitText(text));
  for (;;) {
    uint32_t taken = consumed.load(std::memory_order_relaxed);
    const WaitResult result = wait_reached(signal_word(self_, channel, group_rank), taken + 1, sleepers(self_),
                                           group_->interruption(group_rank), deadline);
    if (result != WaitResult::kReached) return raise(result, operation, channel, group_rank, timeout_ms);
    // Another thread may have taken this one; then wait for the next.
    if (consumed.compare_exchange_strong(taken, taken + 1, std::memory_order_relaxed)) return PHX_OK;
  }
}

bool Symm::has_arrived(uint32_t channel, int peer) const {
  return reached(barrier_word(peer, channel).load(std::memory_order_acquire), barriers_[channel].epoch);
}

// The first rank after this one that has not arrived at the barrier, for an error; `otherwise` if all have by now.
int Symm::first_late(uint32_t channel, int otherwise) const {
  for (int i = 1; i < size(); ++i) {
    const int peer = (self_ + i) % size();
    if (!has_arrived(channel, peer)) return peer;
  }
  return otherwise;
}

phx_status Symm::barrier(uint32_t channel, int64_t timeout_ms) {
  const char *operation = "symm_barrier";
  PHX_TRY(check(operation, self_, channel));
  // A failure of the group interrupts the waits for every rank, this one included. A peer that has left does not count
  // here: it may have arrived at this barrier before.
  if (group_->interruption(self_).load(std::memory_order_acquire) != 0) return group_->raise_revoked(operation);
  Barrier &state = barriers_[channel];
  LazyDeadline deadline(timeout_ms, &group_->world().progress());
  const auto text = [&] {
    std::vector<int> late;
    for (int i = 0; i < size(); ++i)
      if (i != self_ && !has_arrived(channel, i)) late.push_back(i);
    return group_->still_waiting(operation, 0, late);
  };
  deadline.set_text(WaitText(text));
  Turn turn(state.mutex, std::defer_lock);
  if (!take_turn(turn, deadline))
    return group_->raise_turn(operation, "channel of the same allocation. Use another channel for it", timeout_ms,
                              false);
  const Lane &lane = group_->lane(0);
  if (!state.pending) {
    lane.note_core();
    store_and_wake(barrier_word(self_, channel), ++state.epoch, sleepers(self_), group_->fenced_by_sleepers());
    state.pending = true;
  }
  for (const bool first : {true, false}) {
    if (first && !lane.ranks_share_cores()) continue;
    for (int i = 1; i < size(); ++i) {
      const int peer = (self_ + i) % size();
      if (first && !lane.comes_first(peer)) continue;
      const WaitResult result = wait_reached(barrier_word(peer, channel), state.epoch, sleepers(peer),
                                             group_->interruption(peer), deadline, lane.core_of(peer), lane.spins());
      if (result == WaitResult::kReached) continue;
      if (result == WaitResult::kInterrupted) group_->withdraw();
      return raise(result, operation, channel, first_late(channel, peer), timeout_ms);
    }
  }
  state.pending = false;
  return PHX_OK;
}

HistoryEntry &Symm::call_entry(int of, uint64_t sequence) const {
  char *const entries = pad_segments_[of].begin + pad_bytes_of(channels_, size());
  return reinterpret_cast<HistoryEntry *>(entries)[sequence % kCallEntries];
}

// No rank waits: each publishes its call, and then reads those of the ranks that were earlier.
phx_status Symm::compare(const char *operation, const CallRecord &record, uint64_t number) {
  launches_ = number != 0 ? number : launches_ + 1;
  call_entry(self_, launches_).begin(launches_, record);
  // If two ranks do so at the same time, at least one sees the other's call: each stores its sequence before this fence
  // and loads the other's after it. The rank whose fence is the later one in the order of all such fences sees the
  // other's store.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int i = 1; i < size(); ++i) {
    const int peer = (self_ + i) % size();
    Recorded theirs;
    const bool has_come = call_entry(peer, launches_).read(&theirs) && theirs.sequence == launches_;
    if (has_come && !(theirs.call == record))  // otherwise it is not enqueued yet, or far ahead
      return group_->raise_mismatch(operation, launches_, peer, theirs.call, record);
  }
  return PHX_OK;
}

phx_symm *Symm::handle() {
  std::lock_guard<std::mutex> lock(handle_mutex_);
  if (handle_count_++ == 0) kept_ = {group_->shared_from_this(), shared_from_this()};
  return &handle_;
}

void Symm::drop_handle() {
  std::pair<std::shared_ptr<Group>, std::shared_ptr<Symm>> kept;  // released after the lock, which the Symm contains
  std::lock_guard<std::mutex> lock(handle_mutex_);
  if (--handle_count_ == 0) kept = std::move(kept_);
}

}  // namespace phx
