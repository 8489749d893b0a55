#include "p2p/messenger.h"

#include "base/failpoint.h"

namespace phx {
namespace {

constexpr int kSpins = 20;     // as in base/wait.h
constexpr int kAskedOnly = 4;  // fruitless looks before the rings of all peers are read
constexpr int kMoves = 1000;   // the most looks that moved something before the clock is read

}  // namespace

void Messenger::begin_area_at(char *area, uint32_t first) {
  const int group_size = group_->size();
  reinterpret_cast<MessageArea *>(area)->doorbell.store(first, std::memory_order_relaxed);
  for (int from = 0; from < group_size; ++from) {
    auto *const header = reinterpret_cast<RingHeader *>(area + ring_offset(from, group_size));
    header->taken.store(first, std::memory_order_relaxed);
    header->returned.store(first, std::memory_order_relaxed);
  }
}

void Messenger::open(const std::vector<char *> &areas) {
  const int self = self_ = group_->group_rank();
  size_ = static_cast<int>(areas.size());
  ring_bytes_ = ring_bytes(size_);
  credit_bytes_ = credit_bytes(size_);
  fenced_ = group_->fenced_by_sleepers();
  outbound_ = std::vector<Outbound>(size_);
  inbound_ = std::vector<Inbound>(size_);
  matcher_.open(size_);
  remote_ = std::vector<Remote>(size_);
  for (int i = 0; i < size_; ++i) {
    areas_.push_back(reinterpret_cast<MessageArea *>(areas[i]));
    outbound_[i].next_number = inbound_[i].next_number = group_->first_count();
    if (is_remote(i)) continue;
    outbound_[i].ring.open(areas[i] + ring_offset(self, size_), ring_bytes_, fenced_, group_->first_count());
    inbound_[i].ring.open(areas[self] + ring_offset(i, size_), ring_bytes_, fenced_, group_->first_count());
  }
  own_.store(areas_[self], std::memory_order_release);  // pairs with on_failed, which runs on the monitor's thread
}

void Messenger::on_failed() {
  MessageArea *own = own_.load(std::memory_order_acquire);
  if (own == nullptr) return;  // nobody can be waiting yet
  own->doorbell.fetch_add(1, std::memory_order_seq_cst);
  wake_all(own->doorbell);
}

// The load of `sleepers` must not pass the caller's store for that rank (as in Dekker's algorithm: `sleep` announces
// itself and then looks again). Either that store was a full fence, or this fence makes the compiler keep the order and
// the sleeper fences this processor.
void Messenger::wake(int group_rank) {
  if (is_remote(group_rank)) return;
  MessageArea &area = *areas_[group_rank];
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (area.sleepers.load(std::memory_order_seq_cst) == 0) return;
  area.doorbell.fetch_add(1, std::memory_order_seq_cst);
  wake_all(area.doorbell);
}

void Messenger::leave(Lock &lock) {
  if (failure_) {
    const ErrorInfo failure = *std::exchange(failure_, std::nullopt);
    const KeptError kept;  // of this thread: the transfer that failed may be another thread's
    // Under the lock, so that no call sees `closed_` before the group has the cause. fail_with takes no messenger lock.
    group_->fail_with(failure, true);
    group_->raise_in_flight(failure.operation, 0);  // makes the group note that the cause is being reported
    abort_all();
  }
  mind_leaving();
  const bool others = std::exchange(completed_, false);
  lock.unlock();
  if (others) wake(self_);
}

bool Messenger::advance_pending() {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;  // another thread of this rank is moving the transfers
  const bool moved = advance(Take::kWanted);
  if (!closed_ && group_failed()) abort_all();
  leave(lock);
  return moved;
}

phx_status Messenger::begin(Transfer &transfer) {
  if (group_failed()) return group_->raise_revoked(transfer.operation());
  PHX_FAILPOINT(transfer.operation(), 1);
  if (group_->spans_hosts()) begin_with(transfer.peer);
  if (!transfer.sends) {
    post(transfer);  // what a peer sent before it left can still be received
    return PHX_OK;
  }
  if (has_left(transfer.peer)) return set_last_error(ended(transfer, transfer.peer));
  transfer.peer == self_ ? send_to_self(transfer) : send(transfer);
  PHX_FAILPOINT(transfer.operation(), 2);
  return PHX_OK;
}

phx_status Messenger::run(Transfer &transfer, int64_t timeout_ms) {
  Lock lock(mutex_);
  PHX_TRY(begin(transfer));
  leave(lock);
  return wait(transfer, timeout_ms);
}

phx_status Messenger::start(const std::shared_ptr<Transfer> &started) {
  Transfer &transfer = *started;
  transfer.self = started;
  Progress &progress = group_->world().progress();
  progress.began(*this);
  Lock lock(mutex_);
  const phx_status status = begin(transfer);
  if (status != PHX_OK) {
    progress.ended(*this);
    transfer.self.reset();
    return status;
  }
  leave(lock);
  return PHX_OK;
}

phx_status Messenger::wait(Transfer &transfer, int64_t timeout_ms) {
  if (!transfer.complete()) {
    LazyDeadline deadline(timeout_ms, &group_->world().progress(), this);
    await(transfer, deadline);
  }
  PHX_FAILPOINT(transfer.operation(), 3);
  return transfer.report();
}

// Spins, yields and sleeps as wait_reached does, and advances all transfers of this rank in between.
void Messenger::await(Transfer &transfer, LazyDeadline &deadline) {
  for (int looks = 0, moves = 0; looks < kSpins && moves < kMoves; ++looks) {
    const WaitResult seen = look(transfer, looks < kAskedOnly ? Take::kWanted : Take::kAll);
    if (seen == WaitResult::kReached) return;
    if (seen == WaitResult::kMoved) looks = 0, ++moves;
    cpu_relax();
  }
  const auto text = [&]() -> std::string {
    const std::vector<int> late(transfer.peer == PHX_ANY_RANK ? 0 : 1, transfer.peer);
    return group_->still_waiting(transfer.operation(), 0, late);
  };
  const LongWait long_wait(WaitText(text), deadline.at_ns(), deadline.budget_ms());
  const WaitResult result =
      Waiter(deadline).wait([&] { return look(transfer, Take::kAll); }, [&] { return sleep(transfer, deadline); });
  if (result != WaitResult::kReached) give_up(transfer, result == WaitResult::kTimeout, deadline.budget_ms());
}

WaitResult Messenger::look(Transfer &transfer, Take take) {
  Lock lock(mutex_, std::try_to_lock);
  // Another thread of this rank that holds the lock advances this transfer as well.
  if (!lock.owns_lock()) return transfer.complete() ? WaitResult::kReached : WaitResult::kNothing;
  return look(transfer, take, lock);
}

WaitResult Messenger::look(Transfer &transfer, Take take, Lock &lock) {
  const bool moved = advance(take);
  const bool cut = !moved && interrupted(transfer);
  leave(lock);
  if (transfer.complete()) return WaitResult::kReached;
  return moved ? WaitResult::kMoved : cut ? WaitResult::kInterrupted : WaitResult::kNothing;
}

// Sleeps until the doorbell of this rank rings, unless a last look finds that something has happened.
WaitResult Messenger::sleep(Transfer &transfer, LazyDeadline &deadline) {
  MessageArea &own = *areas_[self_];
  // The announcement is seq_cst and fenced, and a last look follows under the lock. The look sees every record, room or
  // completion that was stored before it; a thread that stores one later sees the announcement and rings (see wake).
  own.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (fenced_) fence_others();
  const uint32_t rings = own.doorbell.load(std::memory_order_seq_cst);
  Lock lock(mutex_);
  const WaitResult seen = look(transfer, Take::kAll, lock);
  if (seen == WaitResult::kNothing && group_->spans_hosts())
    sleep_between_hosts(transfer, own.doorbell, rings, deadline);
  else if (seen == WaitResult::kNothing)
    sleep_until_reached(own.doorbell, rings + 1, group_->interruption(self_), deadline);
  own.sleepers.fetch_sub(1, std::memory_order_relaxed);
  return seen;
}

void Messenger::give_up(Transfer &transfer, bool timed_out, int64_t timeout_ms) {
  Lock lock(mutex_);
  advance(Take::kAll);  // a message that has arrived goes before the error
  if (!transfer.complete()) {
    if (group_failed())
      abort_all();
    else if (timed_out && interrupt_requested())
      end_interrupted(transfer);
    else if (timed_out)
      fail(&transfer, timeout(transfer, timeout_ms));
    else if (transfer.peer == PHX_ANY_RANK)
      abort(transfer, transfer.from);
    else
      abort_peer(transfer.peer);
  }
  leave(lock);
}

void Messenger::test(Transfer &transfer) {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  if (!advance(Take::kWanted)) advance(Take::kAll);
  const bool cut = interrupted(transfer);
  leave(lock);
  if (cut && !transfer.complete()) give_up(transfer, false, 0);
}

phx_status Transfer::wait(int64_t timeout_ms) { return messenger.wait(*this, timeout_ms); }

phx_status Transfer::test() {
  if (!complete()) messenger.test(*this);
  return report();
}

// ---- peers on other hosts

void Messenger::begin_with(int peer) {
  for (int i = 0; i < size_; ++i)
    if (is_remote(i) && !remote_[i].ring && (peer == i || peer == PHX_ANY_RANK))
      remote_[i].ring = std::make_unique<RemoteRing>(net_of(*group_), i, MessageName::kMessages);
}

// A send is complete once its message is in the ring. The rank may then wait for something else.
void Messenger::mind_leaving() {
  if (!group_->spans_hosts()) return;
  const auto sends = [](const Remote &remote) { return remote.ring && remote.ring->sends(); };
  const bool minds = !closed_ && std::any_of(remote_.begin(), remote_.end(), sends);
  if (minds == minds_leaving_) return;
  minds_leaving_ = minds;
  Progress &progress = group_->world().progress();
  minds ? progress.insist(*this) : progress.relent(*this);
}

void Messenger::flush() {
  const Lock lock(mutex_);
  const Deadline deadline = Deadline::after_ms(kPartingMs);
  for (Remote &remote : remote_)
    if (remote.ring) remote.ring->flush(deadline);
}

void Messenger::close() {
  if (group_->ends_well()) flush();
  const Lock lock(mutex_);
  for (Remote &remote : remote_) remote.ring.reset();
  mind_leaving();
}

RingResult Messenger::put(int peer, const Record &record, size_t *taken) {
  return is_remote(peer) ? remote_[peer].ring->put(record, taken) : outbound_[peer].ring.put(record, taken);
}
RingResult Messenger::charge(int peer, uint32_t cost) {
  return is_remote(peer) ? remote_[peer].ring->charge(cost) : outbound_[peer].ring.charge(cost, credit_bytes_);
}
RingResult Messenger::peek(int peer, Record *out) {
  if (!is_remote(peer)) return inbound_[peer].ring.peek(out);
  return remote_[peer].ring ? remote_[peer].ring->peek(out) : RingResult::kNothing;
}
void Messenger::release(int peer, const Record &record) {
  is_remote(peer) ? remote_[peer].ring->release() : inbound_[peer].ring.release(record);
}
bool Messenger::charge_peer(int peer, uint32_t cost) {
  return is_remote(peer) ? remote_[peer].ring->charge_peer(cost) : inbound_[peer].ring.charge(cost, credit_bytes_);
}
void Messenger::give_back(int peer, uint32_t cost) {
  is_remote(peer) ? remote_[peer].ring->give_back(cost) : inbound_[peer].ring.give_back(cost);
}

void Messenger::sleep_between_hosts(const Transfer &transfer, const SharedWord &doorbell, uint32_t rings,
                                    const LazyDeadline &deadline) {
  constexpr int64_t kSliceNs = 1000 * 1000, kBothNs = 100 * 1000;
  deadline.poll();
  const int peer = transfer.from != PHX_ANY_RANK ? transfer.from : transfer.peer;
  if (peer != PHX_ANY_RANK && is_remote(peer))
    net_of(*group_).sleep(kSliceNs);
  else
    sleep_while(doorbell, rings, kBothNs);
}

// The carrier takes what is left of a message that has its CTS.
void Messenger::carry(Transfer &transfer) {
  const int peer = transfer.other();
  transfer.carried = std::make_unique<Transfers>(net_of(*group_));
  transfer.stage = Transfer::Stage::kCarried;
  outbound_[peer].carried.push_back(&transfer);
  const size_t rest = transfer.bytes - transfer.moved;
  if (transfer.sends)
    remote_[peer].ring->send_rest(*transfer.carried, transfer.number, transfer.in + transfer.moved, rest);
  else
    remote_[peer].ring->receive_rest(*transfer.carried, transfer.number, transfer.out + transfer.moved, rest);
}

// Takes in records, and completes what the carrier has moved. Returns whether anything has come.
bool Messenger::advance_remote(int peer) {
  Remote &remote = remote_[peer];
  bool moved = false;
  phx_status status = remote.ring->advance(&moved);
  for (Transfer *transfer = outbound_[peer].carried.front(); transfer != nullptr;) {
    Transfer &carried = *std::exchange(transfer, transfer->next);
    const phx_status ended = carried.carried->poll();
    if (ended == PHX_IN_PROGRESS) continue;
    if (ended != PHX_OK) {
      status = ended;
      continue;
    }
    outbound_[peer].carried.remove(&carried);
    carried.carried.reset();
    carried.stage = Transfer::Stage::kNone;
    carried.moved = carried.bytes;
    if (!carried.sends) --inbound_[peer].awaited;
    finish(carried, PHX_OK);
    moved = true;
  }
  if (status == PHX_OK || has_left(peer)) return moved;
  // The monitor knows more about the end of a process than the carrier about that of its connection.
  if (remote.lost_ns == 0) remote.lost_ns = now_ns();
  if (now_ns() - remote.lost_ns < kVerdictMs * 1000 * 1000) return moved;
  const KeptError kept;
  fail(nullptr, error_of("messages", kept.info().status, peer,
                         "the connection to " + group_->describe(peer) + " was lost: " + kept.info().text));
  return true;
}

}  // namespace phx
