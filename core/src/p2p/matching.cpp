#include "p2p/matching.h"

namespace phx {

Matcher::~Matcher() {
  while (Arrival *arrival = oldest(PHX_ANY_RANK)) take(arrival);
}

void Matcher::post(Transfer *receive) {
  receive->stage = Transfer::Stage::kPosted;
  posted_.of(receive->head.tag).push_back(receive);
  ++(receive->peer == PHX_ANY_RANK ? posted_from_any_ : posted_from_[receive->peer]);
}

void Matcher::withdraw(Transfer *receive) {
  receive->stage = Transfer::Stage::kNone;
  posted_.of(receive->head.tag).remove(receive);
  --(receive->peer == PHX_ANY_RANK ? posted_from_any_ : posted_from_[receive->peer]);
}

Transfer *Matcher::match(int source, uint32_t tag) {
  Transfer *const receive = posted_.find(tag, [&](const Transfer &posted) {
    return posted.head.tag == tag && (posted.peer == source || posted.peer == PHX_ANY_RANK);
  });
  if (receive != nullptr) withdraw(receive);
  return receive;
}

Transfer *Matcher::any_posted(int peer) const {
  if ((peer == PHX_ANY_RANK ? posted_from_any_ : posted_from_[peer]) == 0) return nullptr;
  return posted_.find_any([&](const Transfer &receive) { return receive.peer == peer; });
}

void Matcher::keep(std::unique_ptr<Arrival> arrival) {
  auto &list = arrivals_.of(arrival->head.tag);
  list.push_back(arrival.release());
}

Arrival *Matcher::find(const Transfer &receive) const {
  const uint32_t tag = receive.head.tag;
  return arrivals_.find(tag, [&](const Arrival &arrival) {
    return arrival.head.tag == tag && (receive.peer == arrival.source || receive.peer == PHX_ANY_RANK);
  });
}

std::unique_ptr<Arrival> Matcher::take(Arrival *arrival) {
  arrivals_.of(arrival->head.tag).remove(arrival);
  return std::unique_ptr<Arrival>(arrival);
}

Arrival *Matcher::find_own(const Transfer &send) const {
  return arrivals_.find(send.head.tag, [&](const Arrival &arrival) { return arrival.send == &send; });
}

Arrival *Matcher::oldest(int source) const {
  return arrivals_.find_any([&](const Arrival &arrival) { return source == PHX_ANY_RANK || arrival.source == source; });
}

}  // namespace phx
