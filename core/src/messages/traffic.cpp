// What moves: sends into rings, records out of them, into the buffer of a receive or onto the heap.
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>

#include "collectives/operation.h"
#include "group/group.h"
#include "messages/messenger.h"

namespace phx {

bool Messenger::advance(Take take) {
  if (closed_) return false;
  bool moved = false;
  for (int i = 0; sending_ > 0 && i < size_; ++i)
    if (!outbound_[i].queue.empty()) moved |= push(i);
  for (int i = 0; i < size_; ++i)
    if (i != self_ && (take == Take::kAll || wanted(i))) moved |= pull(i, take);
  return moved;
}

// ---- sending

void Messenger::send(Transfer &send) {
  Outbound &outbound = outbound_[send.peer];
  if (outbound.queue.empty()) ++sending_;
  outbound.queue.push_back(&send);
  if (outbound.queue.front() == &send) push(send.peer);
}

bool Messenger::push(int peer) {
  Outbound &outbound = outbound_[peer];
  size_t pushed = 0;
  bool moved = false;
  while (Transfer *send = outbound.queue.front()) {
    size_t taken = 0;
    const RingResult result = outbound.ring.put(send->head, send->in, send->moved, send->bytes, &taken);
    if (result == RingResult::kBroken) fail(nullptr, broken(peer, "it says it read more than was sent"));
    if (result != RingResult::kOk) break;
    wake(peer);
    moved = true;
    send->moved += taken;
    if (send->moved == send->bytes) {
      outbound.queue.remove(send);
      finish(*send, PHX_OK);
    }
    if ((pushed += taken) >= ring_bytes_) break;  // a fast receiver must not keep this thread from everything else
  }
  if (outbound.queue.empty()) --sending_;
  return moved;
}

// Complete at once: into the receive that waits, or onto the heap.
void Messenger::send_to_self(Transfer &send) {
  Transfer *receive = matcher_.match(self_, send.head.tag);
  if (receive == nullptr) {
    if (keep_arrival(self_, send.head, send.bytes, send.bytes, send.in))
      finish(send, PHX_OK);
    else
      finish_with(send, *failure_);
    return;
  }
  receive->source = self_;
  if (!agree(*receive, self_, send.head)) return finish_with(send, *failure_);
  if (send.bytes != 0) std::memmove(receive->out, send.in, send.bytes);
  finish(*receive, PHX_OK);
  finish(send, PHX_OK);
}

// ---- receiving

// False, and the group has failed, when the two sides disagree.
bool Messenger::agree(Transfer &receive, int source, const MessageHead &sent) {
  if (receive.head == sent) return true;
  fail(&receive, mismatch(receive, source, sent));
  return false;
}

void Messenger::post(Transfer &receive) {
  Arrival *found = matcher_.find(receive);
  if (found == nullptr) return matcher_.post(&receive);
  const std::unique_ptr<Arrival> arrival = matcher_.take(found);
  receive.source = arrival->source;
  Incoming &incoming = inbound_[arrival->source].incoming;
  const bool whole = incoming.arrival != found;
  if (!whole) incoming.arrival = nullptr, incoming.to = nullptr;
  if (!agree(receive, arrival->source, arrival->head)) return;
  copy_bytes(receive.out, arrival->data.get(), arrival->received);
  if (whole) return finish(receive, PHX_OK);
  incoming.receive = &receive;  // the rest goes where it belongs
  incoming.to = receive.out;
}

bool Messenger::pull(int source, Take take) {
  Inbound &inbound = inbound_[source];
  size_t pulled = 0;
  bool moved = false;
  do {
    Record record;
    const RingResult result = inbound.ring.peek(&record);
    if (result == RingResult::kNothing) break;
    if (result == RingResult::kBroken) {
      fail(nullptr, broken(source, "a record has no place in the stream or no possible size"));
      break;
    }
    if ((!inbound.incoming.active && !open_message(source, record)) || !append(source, record)) break;
    inbound.ring.release(record);
    wake(source);
    moved = true;
    pulled += record.bytes;
  } while (pulled < ring_bytes_ && (take == Take::kAll || wanted(source)));
  return moved;
}

// False when the group has failed.
bool Messenger::open_message(int source, const Record &record) {
  const size_t item = phx_dtype_size(record.head.dtype);
  if (item == 0 || record.offset != 0 ||
      record.head.count > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) / item) {
    fail(nullptr, broken(source, "a message begins with an impossible header"));
    return false;
  }
  Incoming &incoming = inbound_[source].incoming;
  incoming = Incoming{};
  incoming.head = record.head;
  incoming.total = record.head.count * item;
  if (Transfer *receive = matcher_.match(source, record.head.tag)) {
    receive->source = source;
    if (!agree(*receive, source, record.head)) return false;
    incoming.receive = receive;
    incoming.to = receive->out;
  } else if (!keep_arrival(source, record.head, incoming.total, 0, nullptr)) {
    return false;
  }
  incoming.active = true;
  return true;
}

// False when the group has failed.
bool Messenger::keep_arrival(int source, const MessageHead &head, size_t total, size_t received, const char *data) {
  auto arrival = std::unique_ptr<Arrival>(new (std::nothrow) Arrival);
  if (arrival) arrival->data.reset(new (std::nothrow) char[total]);
  if (!arrival || !arrival->data) {
    fail(nullptr,
         error_of("recv", PHX_ERR_NO_MEMORY, source,
                  "there is no memory for a message of " + std::to_string(total) + " bytes from rank " +
                      std::to_string(group_->rank_of(source)) +
                      ", which no receive has asked for yet. Post receives of large messages before they are sent."));
    return false;
  }
  arrival->source = source;
  arrival->head = head;
  arrival->received = received;
  copy_bytes(arrival->data.get(), data, received);
  if (source != self_) {
    inbound_[source].incoming.arrival = arrival.get();
    inbound_[source].incoming.to = arrival->data.get();
  }
  matcher_.keep(std::move(arrival));
  return true;
}

// False when the group has failed.
bool Messenger::append(int source, const Record &record) {
  Incoming &incoming = inbound_[source].incoming;
  const bool fits = record.bytes <= incoming.total - incoming.received && (record.bytes != 0 || incoming.total == 0);
  if (!fits || !(record.head == incoming.head) || record.offset != incoming.received) {
    fail(nullptr, broken(source, "a record does not continue its message"));
    return false;
  }
  if (incoming.to != nullptr)
    deliver_bytes(incoming.to + incoming.received, record.data, record.bytes,
                  incoming.total >= group_->tuning().streaming_bytes);
  incoming.received += record.bytes;
  if (incoming.arrival != nullptr) incoming.arrival->received = incoming.received;
  if (incoming.received < incoming.total) return true;
  Transfer *receive = incoming.receive;
  incoming = Incoming{};
  if (receive != nullptr) finish(*receive, PHX_OK);
  return true;
}

}  // namespace phx
