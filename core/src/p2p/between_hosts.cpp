// The part of the messenger that tells apart peers with a ring in shared memory and peers on other hosts.
#include "p2p/messenger.h"

#include <utility>

#include "base/deadline.h"
#include "group/group.h"

namespace phx {
namespace {

constexpr int64_t kVerdictNs = 250 * 1000 * 1000;  // as in net/net.cpp

}  // namespace

bool Messenger::is_cut_off(int peer) const {
  return has_left(peer) && (!is_remote(peer) || remote_[peer].parting.is_over());
}

void Messenger::begin_with(int peer) {
  for (int i = 0; i < size_; ++i)
    if (is_remote(i) && !remote_[i].ring && (peer == i || peer == PHX_ANY_RANK))
      remote_[i].ring = std::make_unique<RemoteRing>(net_of(*group_), i, MessageName::kMessages, group_->first_count(),
                                                     credit_bytes_, &leaving_);
}

// A send is complete once its message is in the ring. The rank may then wait for something else.
void Messenger::mind_leaving() {
  const bool minds = leaving_ != 0 && !closed_;
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
  const int peer = transfer.source != PHX_ANY_RANK ? transfer.source : transfer.peer;
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
  if (now_ns() - remote.lost_ns < kVerdictNs) return moved;
  const KeptError kept;
  fail(nullptr, error_of("messages", kept.info().status, peer,
                         "the connection to " + group_->describe(peer) + " was lost: " + kept.info().text));
  return true;
}

}  // namespace phx
