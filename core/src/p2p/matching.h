// Which receive gets which message: receives that wait, and messages that no receive has asked for yet; and where the
// transfers are that wait for a record with their number.
//
// All are kept in a fixed number of lists, by tag or by number, so that a search passes few entries with thousands in
// flight and nothing is allocated for a transfer.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "p2p/transfer.h"

namespace phx {

// A message that came before its receive: its eager part lies on the heap of its receiver.
struct Arrival {
  int source = 0;
  MessageHead head{};
  uint32_t number = 0;
  bool rendezvous = false;
  size_t eager = 0;
  size_t received = 0;  // bytes, of `eager`
  std::unique_ptr<char[]> data;
  Transfer *send = nullptr;  // a message of this rank to itself that is too large to be kept: its data is still there
  Arrival *next = nullptr, *previous = nullptr;
};

class Matcher {
 public:
  ~Matcher();
  void open(int group_size) { posted_from_.assign(group_size, 0); }

  void post(Transfer *receive);
  void withdraw(Transfer *receive);
  // Takes out the oldest receive that such a message meets; NULL if there is none.
  Transfer *match(int source, uint32_t tag);
  // Any receive that waits, for group rank `peer` or PHX_ANY_RANK; NULL if there is none.
  Transfer *any_posted(int peer) const;
  // Whether a receive waits that a message of that rank could meet.
  bool wanted(int source) const { return posted_from_any_ + posted_from_[source] > 0; }

  void keep(std::unique_ptr<Arrival> arrival);
  // The oldest arrival that this receive meets, perhaps not whole yet; NULL if there is none.
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

// Transfers by their other end and number.
class NumberedTransfers {
 public:
  void add(Transfer *transfer) { list(transfer->number).push_back(transfer); }
  void remove(Transfer *transfer) { list(transfer->number).remove(transfer); }
  Transfer *find(int other, uint32_t number) const;  // NULL if there is none
  Transfer *any(int other) const;                    // likewise

 private:
  static constexpr size_t kBuckets = 128;
  LinkedList<Transfer> &list(uint32_t number) { return lists_[number % kBuckets]; }

  std::array<LinkedList<Transfer>, kBuckets> lists_;
};

}  // namespace phx
