#include "p2p/matching.h"

namespace phx {

Matcher::~Matcher() {
  for (const auto &list : arrivals_) {
    for (Arrival *arrival = list.front(); arrival != nullptr;) {
      const std::unique_ptr<Arrival> owner(arrival);
      arrival = arrival->next;
    }
  }
}

void Matcher::post(Transfer *receive) {
  receive->stage = Transfer::Stage::kPosted;
  posted_[bucket(receive->head.tag)].push_back(receive);
  ++(receive->peer == PHX_ANY_RANK ? posted_from_any_ : posted_from_[receive->peer]);
}

void Matcher::withdraw(Transfer *receive) {
  receive->stage = Transfer::Stage::kNone;
  posted_[bucket(receive->head.tag)].remove(receive);
  --(receive->peer == PHX_ANY_RANK ? posted_from_any_ : posted_from_[receive->peer]);
}

Transfer *Matcher::match(int source, uint32_t tag) {
  for (Transfer *receive = posted_[bucket(tag)].front(); receive != nullptr; receive = receive->next) {
    if (receive->head.tag != tag || (receive->peer != source && receive->peer != PHX_ANY_RANK)) continue;
    withdraw(receive);
    return receive;
  }
  return nullptr;
}

Transfer *Matcher::any_posted(int peer) const {
  if ((peer == PHX_ANY_RANK ? posted_from_any_ : posted_from_[peer]) == 0) return nullptr;
  for (const auto &list : posted_)
    for (Transfer *receive = list.front(); receive != nullptr; receive = receive->next)
      if (receive->peer == peer) return receive;
  return nullptr;
}

void Matcher::keep(std::unique_ptr<Arrival> arrival) {
  auto &list = arrivals_[bucket(arrival->head.tag)];
  list.push_back(arrival.release());
}

Arrival *Matcher::find(const Transfer &receive) const {
  const uint32_t tag = receive.head.tag;
  for (Arrival *arrival = arrivals_[bucket(tag)].front(); arrival != nullptr; arrival = arrival->next)
    if (arrival->head.tag == tag && (receive.peer == arrival->source || receive.peer == PHX_ANY_RANK)) return arrival;
  return nullptr;
}

std::unique_ptr<Arrival> Matcher::take(Arrival *arrival) {
  arrivals_[bucket(arrival->head.tag)].remove(arrival);
  return std::unique_ptr<Arrival>(arrival);
}

Arrival *Matcher::find_own(const Transfer &send) const {
  Arrival *arrival = arrivals_[bucket(send.head.tag)].front();
  while (arrival != nullptr && arrival->send != &send) arrival = arrival->next;
  return arrival;
}

const Arrival *Matcher::oldest(int source) const {
  for (const auto &list : arrivals_)
    for (const Arrival *arrival = list.front(); arrival != nullptr; arrival = arrival->next)
      if (source == PHX_ANY_RANK || arrival->source == source) return arrival;
  return nullptr;
}

Transfer *NumberedTransfers::find(int other, uint32_t number) const {
  Transfer *transfer = lists_[number % kBuckets].front();
  while (transfer != nullptr && (transfer->number != number || transfer->other() != other)) transfer = transfer->next;
  return transfer;
}

Transfer *NumberedTransfers::any(int other) const {
  for (const auto &list : lists_)
    for (Transfer *transfer = list.front(); transfer != nullptr; transfer = transfer->next)
      if (transfer->other() == other) return transfer;
  return nullptr;
}

}  // namespace phx
