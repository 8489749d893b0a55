// Which receive gets which message: receives that wait, and messages that nobody has asked for yet.
//
// Both are kept by tag in a fixed number of lists, so that a search passes few entries with thousands in flight and
// nothing is allocated for a receive.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "messages/transfer.h"

namespace phx {

// A message that came before its receive, on the heap of its receiver.
struct Arrival {
  int source = 0;
  MessageHead head{};
  size_t total = 0;
  size_t received = 0;
  std::unique_ptr<char[]> data;
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

}  // namespace phx
