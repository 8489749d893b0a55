// The two ends of a ring. Each end is used by one rank, under the lock of its messenger.
#pragma once

#include "p2p/layout.h"

namespace phx {

enum class RingResult {
  kOk,
  kNothing,  // there is no record, or no room for one, yet
  kBroken    // the peer wrote impossible values
};

// A record (see RecordHeader) with a pointer to its data. The receiver reads it once from shared memory and checks it.
struct Record {
  RecordKind kind = RecordKind::kEager;
  MessageHead head{};  // CTS and DATA: head.tag is the number of the message
  uint64_t offset = 0;
  size_t bytes = 0;
  const char *data = nullptr;
};

class RingWriter {
 public:
  // fenced_by_sleepers: see store_and_wake. `first`: where the counts of lines and of credit begin
  // (Group::first_count).
  void open(char *ring, size_t bytes, bool fenced_by_sleepers, uint32_t first = 0);
  // Writes a record with as many of the record.bytes bytes at record.data as fit, and sets `taken` to their number: at
  // least one, unless record.bytes is 0.
  RingResult put(const Record &record, size_t *taken);
  // Uses credit for an eager message. kNothing: there is not enough.
  RingResult charge(uint32_t cost, size_t credit);

 private:
  SharedWord &flag(uint32_t line) const { return reinterpret_cast<RecordHeader *>(at(line))->flag; }
  char *at(uint32_t line) const { return data_ + static_cast<size_t>(line & (lines_ - 1)) * kLine; }

  RingHeader *header_ = nullptr;
  char *data_ = nullptr;
  uint32_t lines_ = 0;
  uint32_t written_ = 0;      // lines since the beginning, modulo 2^32
  uint32_t known_taken_ = 0;  // lines that the receiver has read, when last looked at
  uint32_t charged_ = 0;      // bytes of credit used since the beginning, modulo 2^32
  uint32_t known_returned_ = 0;
  bool fenced_ = false;
};

class RingReader {
 public:
  void open(char *ring, size_t bytes, bool fenced_by_sleepers, uint32_t first = 0);
  // The next record, which stays until `release`.
  RingResult peek(Record *out) const;
  void release(const Record &record);
  // Notes that the peer has used credit. False if it used more than it had.
  bool charge(uint32_t cost, size_t credit);
  void give_back(uint32_t cost);

 private:
  char *at(uint32_t line) const { return data_ + static_cast<size_t>(line & (lines_ - 1)) * kLine; }

  RingHeader *header_ = nullptr;
  char *data_ = nullptr;
  uint32_t lines_ = 0;
  uint32_t taken_ = 0;
  uint32_t charged_ = 0;
  uint32_t returned_ = 0;
  bool fenced_ = false;
};

}  // namespace phx
