// Matches messages with receives: holds the posted receives and the unexpected messages, which no receive matches yet.
// Also finds the transfers that wait for a record with their number.
#pragma once

#include <array>
#include <vector>

#include "p2p/transfer.h"

namespace phx {

// An unexpected message: it came before its receive, and its eager part lies on the heap of this rank.
struct Arrival {
  int source = 0;
  MessageHead head{};
  uint32_t number = 0;
  bool rendezvous = false;
  size_t eager = 0;
  size_t received = 0;  // bytes, of `eager`
  std::unique_ptr<char[]> data;
  Transfer *send = nullptr;  // a send of this rank to itself, too large to copy: the data is still in its buffer
  Arrival *next = nullptr, *previous = nullptr;
};

// Lists by a key, a tag or a number. Their count is fixed, so that a search passes few entries even with thousands in
// flight, and a transfer needs no allocation.
template <class T>
class Buckets {
 public:
  LinkedList<T> &of(uint32_t key) { return lists_[bucket(key)]; }
  // The first for which `is` is true, of those with that key or of all; NULL if there is none.
  template <class Is>
  T *find(uint32_t key, Is is) const {
    return lists_[bucket(key)].find(is);
  }
  template <class Is>
  T *find_any(Is is) const {
    for (const auto &list : lists_)
      if (T *const found = list.find(is)) return found;
    return nullptr;
  }

 private:
  static constexpr size_t kCount = 128;
  static size_t bucket(uint32_t key) { return (key * 2654435761u) >> 25; }  // Fibonacci hashing
  static_assert(kCount == size_t{1} << (32 - 25));

  std::array<LinkedList<T>, kCount> lists_;
};

class Matcher {
 public:
  ~Matcher() {
    while (Arrival *arrival = oldest(PHX_ANY_RANK)) take(arrival);
  }
  void open(int group_size) { posted_from_.assign(group_size, 0); }

  void post(Transfer *receive) {
    receive->stage = Transfer::Stage::kPosted;
    posted_.of(receive->head.tag).push_back(receive);
    ++posted_from(receive->peer);
  }
  void withdraw(Transfer *receive) {
    receive->stage = Transfer::Stage::kNone;
    posted_.of(receive->head.tag).remove(receive);
    --posted_from(receive->peer);
  }
  // Removes and returns the oldest receive that matches a message; NULL if there is none.
  Transfer *match(int source, uint32_t tag) {
    Transfer *const receive = posted_.find(tag, [&](const Transfer &posted) {
      return posted.head.tag == tag && (posted.peer == source || posted.peer == PHX_ANY_RANK);
    });
    if (receive != nullptr) withdraw(receive);
    return receive;
  }
  // Any receive that waits, for group rank `peer` or PHX_ANY_RANK; NULL if there is none.
  Transfer *any_posted(int peer) {
    if (posted_from(peer) == 0) return nullptr;
    return posted_.find_any([&](const Transfer &receive) { return receive.peer == peer; });
  }
  // Whether a posted receive could match a message of that rank.
  bool wanted(int source) const { return posted_from_any_ + posted_from_[source] > 0; }

  void keep(std::unique_ptr<Arrival> arrival) {
    auto &list = arrivals_.of(arrival->head.tag);
    list.push_back(arrival.release());
  }
  // The oldest arrival that matches this receive, perhaps not complete yet; NULL if there is none.
  Arrival *find(const Transfer &receive) const {
    const uint32_t tag = receive.head.tag;
    return arrivals_.find(tag, [&](const Arrival &arrival) {
      return arrival.head.tag == tag && (receive.peer == arrival.source || receive.peer == PHX_ANY_RANK);
    });
  }
  std::unique_ptr<Arrival> take(Arrival *arrival) {
    arrivals_.of(arrival->head.tag).remove(arrival);
    return std::unique_ptr<Arrival>(arrival);
  }
  // The arrival that stands for a send of this rank to itself; NULL if there is none.
  Arrival *find_own(const Transfer &send) const {
    return arrivals_.find(send.head.tag, [&](const Arrival &arrival) { return arrival.send == &send; });
  }
  // The oldest arrival of a rank (PHX_ANY_RANK: of all); for error texts.
  Arrival *oldest(int source) const {
    return arrivals_.find_any(
        [&](const Arrival &arrival) { return source == PHX_ANY_RANK || arrival.source == source; });
  }

 private:
  int &posted_from(int peer) { return peer == PHX_ANY_RANK ? posted_from_any_ : posted_from_[peer]; }

  Buckets<Transfer> posted_;   // by tag, each list in the order of the calls
  Buckets<Arrival> arrivals_;  // by tag, each list in the order of arrival
  std::vector<int> posted_from_;
  int posted_from_any_ = 0;
};

// Transfers by their peer and number.
class NumberedTransfers {
 public:
  void add(Transfer *transfer) { by_number_.of(transfer->number).push_back(transfer); }
  void remove(Transfer *transfer) { by_number_.of(transfer->number).remove(transfer); }
  Transfer *find(int other, uint32_t number) const {  // NULL if there is none
    return by_number_.find(number, [&](const Transfer &t) { return t.number == number && t.other() == other; });
  }
  Transfer *any(int other) const {  // NULL if there is none
    return by_number_.find_any([&](const Transfer &transfer) { return transfer.other() == other; });
  }

 private:
  Buckets<Transfer> by_number_;
};

}  // namespace phx
