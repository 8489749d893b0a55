// The two ends of a ring. Each end is used by one rank, under the lock of its messenger.
#pragma once

#include "messages/layout.h"

namespace phx {

enum class RingResult {
  kOk,
  kNothing,  // no record, or no room for one: later
  kBroken    // the peer wrote what cannot be
};

// A record as its receiver sees it: read once from shared memory and checked.
struct Record {
  MessageHead head{};
  uint64_t offset = 0;
  size_t bytes = 0;
  const char *data = nullptr;
};

class RingWriter {
 public:
  // fenced_by_sleepers: see store_and_wake. `first`: how many lines count as written and taken (Group::first_count).
  void open(char *ring, size_t bytes, bool fenced_by_sleepers, uint32_t first = 0);
  // Writes the bytes from `offset` on of a message of `total`, at `data`, as far as one record takes them.
  RingResult put(const MessageHead &head, const char *data, size_t offset, size_t total, size_t *taken);

 private:
  SharedWord &flag(uint32_t line) const { return reinterpret_cast<RecordHeader *>(at(line))->flag; }
  char *at(uint32_t line) const { return data_ + static_cast<size_t>(line & (lines_ - 1)) * kLine; }

  RingHeader *header_ = nullptr;
  char *data_ = nullptr;
  uint32_t lines_ = 0;
  uint32_t written_ = 0;      // lines since the beginning, modulo 2^32
  uint32_t known_taken_ = 0;  // likewise
  bool fenced_ = false;
};

class RingReader {
 public:
  void open(char *ring, size_t bytes, bool fenced_by_sleepers, uint32_t first = 0);
  // The next record, which stays until `release`.
  RingResult peek(Record *out) const;
  void release(const Record &record);

 private:
  char *at(uint32_t line) const { return data_ + static_cast<size_t>(line & (lines_ - 1)) * kLine; }

  RingHeader *header_ = nullptr;
  char *data_ = nullptr;
  uint32_t lines_ = 0;
  uint32_t taken_ = 0;
  bool fenced_ = false;
};

}  // namespace phx
