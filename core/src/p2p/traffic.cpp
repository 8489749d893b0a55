// Moves data from sends into rings, and from rings into buffers of receives or onto the heap, as layout.h describes.
#include <limits>
#include <new>

#include "kernels/copies.h"
#include "p2p/messenger.h"

namespace phx {
namespace {

using Stage = Transfer::Stage;

// How much of its sender's credit a message uses. An RTS without data uses none; kMaxAnnounced bounds these.
uint32_t cost_of(bool rendezvous, size_t eager) { return rendezvous && eager == 0 ? 0 : eager_cost(eager); }

}  // namespace

bool Messenger::advance(Take take) {
  if (closed_) return false;
  bool moved = false;
  for (int i = 0; sending_ > 0 && i < size_; ++i)
    if (outbound_[i].counted) moved |= push(i);
  for (int i = 0; i < size_; ++i) {
    if (is_remote(i) && remote_[i].ring) moved |= advance_remote(i);
    if (closed_) return moved;
    if (i != self_ && (take == Take::kAll || wanted(i))) moved |= pull(i, take);
  }
  return moved;
}

// ---- sending

void Messenger::send(Transfer &send) {
  Outbound &outbound = outbound_[send.peer];
  const bool idle = !outbound.counted;
  send.stage = Stage::kQueued;
  outbound.queue.push_back(&send);
  if (idle) push(send.peer);
}

// Updates `counted` and sending_, so that `advance` need not look at the lists of idle peers.
void Messenger::count(Outbound &outbound) {
  const bool busy = !outbound.clears.empty() || !outbound.data.empty() || !outbound.queue.empty();
  if (busy != outbound.counted) sending_ += busy ? 1 : -1;
  outbound.counted = busy;
}

// Writes CTS first, which let the peer go on, then data of matched messages, then new messages in the calls' order.
bool Messenger::push(int peer) {
  Outbound &outbound = outbound_[peer];
  size_t pushed = 0;
  bool moved = false;
  while (pushed < ring_bytes_) {  // a fast receiver must not keep this thread from everything else
    RingResult result;
    size_t taken = 0;
    if (Transfer *receive = outbound.clears.front())
      result = push_cts(outbound, *receive);
    else if (Transfer *data = outbound.data.front())
      result = push_data(outbound, *data, &taken);
    else if (Transfer *send = outbound.queue.front())
      result = send->begun ? push_data(outbound, *send, &taken) : push_first(outbound, *send, &taken);
    else
      break;
    if (result == RingResult::kBroken) fail_broken(peer, "it says it read, or gave back, more than was sent");
    if (result != RingResult::kOk) break;
    wake(peer);
    moved = true;
    pushed += taken + kLine;
  }
  count(outbound);
  return moved;
}

RingResult Messenger::push_cts(Outbound &outbound, Transfer &receive) {
  size_t taken = 0;
  const RingResult result = put(receive.from, {RecordKind::kCts, {receive.number, 0, 0}}, &taken);
  if (result != RingResult::kOk) return result;
  outbound.clears.remove(&receive);
  if (is_remote(receive.from)) {
    carry(receive);
    return RingResult::kOk;
  }
  receive.stage = Stage::kFilling;
  filling_.add(&receive);
  note_received(receive);
  return RingResult::kOk;
}

// Begins a message: eagerly if it is small and there is credit for it, otherwise by an RTS.
RingResult Messenger::push_first(Outbound &outbound, Transfer &send, size_t *taken) {
  const RingResult planned = send.planned ? RingResult::kOk : plan(outbound, send);
  if (planned != RingResult::kOk) return planned;
  const Record record{send.rendezvous ? RecordKind::kRts : RecordKind::kEager, send.head,
                      send.rendezvous ? send.eager : 0, send.eager, send.in};
  const RingResult result = put(send.peer, record, taken);
  if (result != RingResult::kOk) return result;
  send.begun = true;
  send.number = outbound.next_number++;
  if (send.rendezvous) {
    ++outbound.announced;
    ++inbound_[send.peer].awaited;
  }
  note_sent(outbound, send, *taken);
  return RingResult::kOk;
}

// Decides how a message is sent. kNothing: it cannot begin before the receiver has sent a CTS for others.
RingResult Messenger::plan(Outbound &outbound, Transfer &send) {
  // Between hosts the carrier moves what is not small, as a whole.
  const size_t limit = eager_limit(send.peer),
               eager = is_remote(send.peer) && send.bytes > limit ? 0 : std::min(send.bytes, limit);
  const bool may_announce = outbound.announced < kMaxAnnounced;
  if (eager < send.bytes && !may_announce) return RingResult::kNothing;
  const RingResult charged = charge(send.peer, eager_cost(eager));
  if (charged == RingResult::kBroken || (charged == RingResult::kNothing && !may_announce)) return charged;
  send.rendezvous = charged == RingResult::kNothing || eager < send.bytes;
  send.eager = charged == RingResult::kNothing ? 0 : eager;
  send.planned = true;
  return RingResult::kOk;
}

RingResult Messenger::push_data(Outbound &outbound, Transfer &send, size_t *taken) {
  if (send.moved == send.allowed()) {  // the CTS is for a message whose data is in the ring already, or that has none
    note_sent(outbound, send, 0);
    return RingResult::kOk;
  }
  if (is_remote(send.peer)) {
    outbound.data.remove(&send);
    carry(send);
    return RingResult::kOk;
  }
  const Record record{
      RecordKind::kData, {send.number, 0, 0}, send.moved, send.allowed() - send.moved, send.in + send.moved};
  const RingResult result = put(send.peer, record, taken);
  if (result == RingResult::kOk) note_sent(outbound, send, *taken);
  return result;
}

void Messenger::note_sent(Outbound &outbound, Transfer &send, size_t bytes) {
  send.moved += bytes;
  if (send.moved < send.allowed()) return;
  (send.stage == Stage::kData ? outbound.data : outbound.queue).remove(&send);
  send.stage = Stage::kNone;
  if (!send.rendezvous || send.cleared) return finish(send, PHX_OK);
  send.stage = Stage::kAnnounced;
  announced_.add(&send);
}

// Handles a CTS. False when the group has failed.
bool Messenger::clear(int peer, uint32_t number) {
  Outbound &outbound = outbound_[peer];
  Transfer *send = announced_.find(peer, number);
  if (send != nullptr) {
    announced_.remove(send);
    send->stage = Stage::kData;
    outbound.data.push_back(send);
    count(outbound);
  } else {
    send = outbound.queue.front();  // its eager part may not be in the ring yet
    const bool matches = send != nullptr && send->begun && send->rendezvous && !send->cleared && send->number == number;
    if (!matches) return drop_unknown(peer, "it asks for the data of a message that was not announced");
  }
  send->cleared = true;
  --outbound.announced;
  --inbound_[peer].awaited;
  return true;
}

// Copies the data into a posted receive, or onto the heap. A message that is too large for that waits for its receive.
void Messenger::send_to_self(Transfer &send) {
  if (Transfer *receive = matcher_.match(self_, send.head.tag)) return move_within(send, *receive);
  Outbound &own = outbound_[self_];
  const RingResult planned = plan(own, send);
  if (planned == RingResult::kBroken) return fail(&send, broken(self_, "it gave back more credit than was used"));
  const auto arrival = keep_arrival(self_, send.head, send.rendezvous, send.rendezvous ? 0 : send.bytes);
  if (arrival == nullptr) return finish_with(send, *failure_);
  if (!send.rendezvous) {
    copy_bytes(arrival->data.get(), send.in, send.bytes);
    arrival->received = send.bytes;
    return finish(send, PHX_OK);
  }
  if (send.eager != 0) give_back(self_, eager_cost(send.eager));
  arrival->send = &send;
  send.number = own.next_number++;
  send.stage = Stage::kAnnounced;
  announced_.add(&send);
}

void Messenger::move_within(Transfer &send, Transfer &receive) {
  receive.from = self_;
  if (!check_head(receive, self_, send.head)) return finish_with(send, *failure_);
  if (send.bytes != 0) std::memmove(receive.out, send.in, send.bytes);
  finish(receive, PHX_OK);
  finish(send, PHX_OK);
}

// ---- receiving

// False, and the group has failed, if the envelopes of a send and its receive differ.
bool Messenger::check_head(Transfer &receive, int source, const MessageHead &sent) {
  if (receive.head == sent) return true;
  fail(&receive, mismatch(receive, source, sent));
  return false;
}

void Messenger::post(Transfer &receive) {
  Arrival *match = matcher_.find(receive);
  if (match == nullptr) return matcher_.post(&receive);
  const std::unique_ptr<Arrival> arrival = matcher_.take(match);
  const int source = arrival->source;
  if (arrival->send != nullptr) {
    announced_.remove(arrival->send);
    arrival->send->stage = Stage::kNone;
    return move_within(*arrival->send, receive);
  }
  Inbound &inbound = inbound_[source];
  if (inbound.arrival == match) inbound.arrival = nullptr;
  receive.from = source;
  if (!check_head(receive, source, arrival->head)) return;
  copy_bytes(receive.out, arrival->data.get(), arrival->received);
  receive.moved = arrival->received;
  fill(receive, arrival->number, arrival->rendezvous, arrival->eager);
  if (outbound_[source].counted) push(source);
}

// Makes a matched receive wait for the rest of its message.
void Messenger::fill(Transfer &receive, uint32_t number, bool rendezvous, size_t eager) {
  Inbound &inbound = inbound_[receive.from];
  Outbound &outbound = outbound_[receive.from];
  receive.number = number;
  receive.rendezvous = rendezvous;
  receive.eager = eager;
  receive.owes_credit = cost_of(rendezvous, eager) != 0;
  ++inbound.awaited;
  if (receive.rendezvous) {
    --inbound.announced;
    receive.stage = Stage::kClearing;
    outbound.clears.push_back(&receive);
    count(outbound);
  } else {
    receive.stage = Stage::kFilling;
    filling_.add(&receive);
  }
  note_received(receive);
}

void Messenger::note_received(Transfer &receive) {
  Inbound &inbound = inbound_[receive.from];
  if (receive.owes_credit && receive.moved >= receive.eager) {
    receive.owes_credit = false;
    give_back(receive.from, cost_of(receive.rendezvous, receive.eager));
  }
  if (receive.moved < receive.bytes || receive.stage != Stage::kFilling) return;
  filling_.remove(&receive);
  receive.stage = Stage::kNone;
  --inbound.awaited;
  finish(receive, PHX_OK);
}

bool Messenger::pull(int source, Take take) {
  size_t pulled = 0;
  bool moved = false;
  do {
    Record record;
    const RingResult result = peek(source, &record);
    if (result == RingResult::kBroken) fail_broken(source, "a record has no place in the stream or no possible size");
    if (result != RingResult::kOk || !accept(source, record)) break;
    release(source, record);
    wake(source);
    moved = true;
    pulled += record.bytes + kLine;
  } while (pulled < ring_bytes_ && (take == Take::kAll || wanted(source)));
  if (moved && outbound_[source].counted) push(source);  // a CTS, or the data that a CTS asks for
  return moved;
}

// False when the group has failed.
bool Messenger::accept(int source, const Record &record) {
  switch (record.kind) {
    case RecordKind::kEager:
    case RecordKind::kRts: return open_message(source, record);
    case RecordKind::kCts: return clear(source, record.head.tag);
    case RecordKind::kData: return append(source, record);
    default: break;  // a RemoteRing takes credit, and windows have rings of their own
  }
  return fail_broken(source, "a record is of no known kind");
}

// False when the group has failed.
bool Messenger::open_message(int source, const Record &record) {
  Inbound &inbound = inbound_[source];
  const size_t item = phx_dtype_size(record.head.dtype);
  const bool possible =
      item != 0 && record.head.count <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) / item;
  const size_t total = possible ? record.head.count * item : 0;
  const bool rendezvous = record.kind == RecordKind::kRts;
  const size_t eager = rendezvous ? record.offset : total;
  if (!possible || eager > std::min(total, eager_limit(source)) || record.bytes > eager ||
      (record.bytes == 0 && eager != 0) || (!rendezvous && record.offset != 0))
    return fail_broken(source, "a message begins with an impossible header");
  const uint32_t number = inbound.next_number++;
  if (rendezvous) ++inbound.announced;
  if (!charge_peer(source, cost_of(rendezvous, eager)) || inbound.announced > kMaxAnnounced)
    return fail_broken(source, "it sent more than it may before receives ask for it");
  if (Transfer *receive = matcher_.match(source, record.head.tag)) {
    receive->from = source;
    if (!check_head(*receive, source, record.head)) return false;
    deliver(*receive, record);
    if (!rendezvous && record.bytes == total) {
      give_back(source, eager_cost(eager));
      finish(*receive, PHX_OK);
    } else {
      fill(*receive, number, rendezvous, eager);
    }
    return true;
  }
  Arrival *arrival = keep_arrival(source, record.head, rendezvous, eager);
  if (arrival == nullptr) return false;
  arrival->number = number;
  arrival->received = record.bytes;
  copy_bytes(arrival->data.get(), record.data, record.bytes);
  inbound.arrival = arrival->received < arrival->eager ? arrival : nullptr;
  return true;
}

// Keeps an unexpected message, without its data. NULL when the group has failed.
Arrival *Messenger::keep_arrival(int source, const MessageHead &head, bool rendezvous, size_t eager) {
  auto arrival = std::unique_ptr<Arrival>(new (std::nothrow) Arrival);
  if (arrival && eager != 0) arrival->data.reset(new (std::nothrow) char[eager]);
  if (!arrival || (eager != 0 && !arrival->data)) {
    fail(nullptr, error_of("recv", PHX_ERR_NO_MEMORY, source,
                           "there is no memory for " + std::to_string(eager) + " bytes from rank " +
                               std::to_string(group_->rank_of(source)) +
                               ", which no receive has asked for yet. Post receives before the messages are sent."));
    return nullptr;
  }
  arrival->source = source;
  arrival->head = head;
  arrival->rendezvous = rendezvous;
  arrival->eager = eager;
  Arrival *const retained = arrival.get();
  matcher_.keep(std::move(arrival));
  return retained;
}

void Messenger::deliver(Transfer &receive, const Record &record) {
  deliver_bytes(receive.out + receive.moved, record.data, record.bytes,
                receive.bytes >= group_->tuning().streaming_bytes);
  receive.moved += record.bytes;
}

// Handles more data of a message. False when the group has failed.
bool Messenger::append(int source, const Record &record) {
  const uint32_t number = record.head.tag;
  const auto goes_on = [&](size_t received, size_t most) {
    const bool right = record.bytes != 0 && record.offset == received && record.bytes <= most - received;
    return right || fail_broken(source, "a record does not continue its message");
  };
  Transfer *receive = filling_.find(source, number);
  if (receive == nullptr)
    receive = outbound_[source].clears.find([&](const Transfer &waiting) { return waiting.number == number; });
  if (receive != nullptr) {
    if (!goes_on(receive->moved, receive->stage == Stage::kFilling ? receive->bytes : receive->eager)) return false;
    deliver(*receive, record);
    note_received(*receive);
    return true;
  }
  Arrival *arrival = inbound_[source].arrival;
  if (arrival == nullptr || arrival->number != number)
    return drop_unknown(source, "a record does not continue its message");
  if (!goes_on(arrival->received, arrival->eager)) return false;
  copy_bytes(arrival->data.get() + arrival->received, record.data, record.bytes);
  arrival->received += record.bytes;
  if (arrival->received == arrival->eager) inbound_[source].arrival = nullptr;
  return true;
}

// Handles a record of an unknown message. If the peer has left, this rank has ended that message and ignores the
// record; otherwise the group fails. False when it has failed.
bool Messenger::drop_unknown(int source, const char *problem) {
  return has_left(source) || fail_broken(source, problem);
}

}  // namespace phx
