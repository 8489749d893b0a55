// Matches messages with receives: holds the posted receives and the unexpected messages, which no receive matches yet.
// Also finds the transfers that wait for a record with their number.
//
// All of them are in a fixed number of lists, by tag or by number. So a search passes few entries even with thousands
// in flight, and a transfer needs no allocation.
#pragma once

#include <array>
#include <memory>
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

class Matcher {
 public:
  ~Matcher();
  void open(int group_size) { posted_from_.assign(group_size, 0); }

  void post(Transfer *receive);
  void withdraw(Transfer *receive);
  // Removes and returns the oldest receive that matches a message; NULL if there is none.
  Transfer *match(int source, uint32_t tag);
  // Any receive that waits, for group rank `peer` or PHX_ANY_RANK; NULL if there is none.
  Transfer *any_posted(int peer) const;
  // Whether a posted receive could match a message of that rank.
  bool wanted(int source) const { return posted_from_any_ + posted_from_[source] > 0; }

  void keep(std::unique_ptr<Arrival> arrival);
  // The oldest arrival that matches this receive, perhaps not complete yet; NULL if there is none.
  Arrival *find(const Transfer &receive) const;
  std::unique_ptr<Arrival> take(Arrival *arrival);
  // The arrival that stands for a send of this rank to itself; NULL if there is none.
  Arrival *find_own(const Transfer &send) const;
  // The oldest arrival of a rank (PHX_ANY_RANK: of all); for error texts.
  const Arrival *oldest(int source) const;

 private:
  static constexpr size_t kBuckets = 128;
  static size_t bucket(uint32_t tag) { return (tag * 2654435761u) >> 25; }  // Fibonacci hashing
  static_assert(kBuckets == size_t{1} << (32 - 25));

  std::array<LinkedList<Transfer>, kBuckets> posted_;   // each in the order of the calls
  std::array<LinkedList<Arrival>, kBuckets> arrivals_;  // each in the order of arrival
  std::vector<int> posted_from_;
  int posted_from_any_ = 0;
};

// Transfers by their peer and number.
class NumberedTransfers {
 public:
  void add(Transfer *transfer) { list(transfer->number).push_back(transfer); }
  void remove(Transfer *transfer) { list(transfer->number).remove(transfer); }
  Transfer *find(int other, uint32_t number) const;  // NULL if there is none
  Transfer *any(int other) const;                    // NULL if there is none

 private:
  static constexpr size_t kBuckets = 128;
  LinkedList<Transfer> &list(uint32_t number) { return lists_[number % kBuckets]; }

  std::array<LinkedList<Transfer>, kBuckets> lists_;
};

}  // namespace phx
