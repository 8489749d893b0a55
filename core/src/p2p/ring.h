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

inline void write_head(const Record &record, size_t bytes, RecordHeader *out) {
  out->bytes = static_cast<uint32_t>(bytes);
  out->tag = record.head.tag;
  out->dtype = static_cast<int16_t>(record.head.dtype);
  out->kind = record.kind;
  out->count = record.head.count;
  out->offset = record.offset;
}

// Each field is read once, so that what is used is what was checked, even if a broken peer goes on writing.
inline void read_head(const RecordHeader &header, Record *out) {
  out->bytes = *const_cast<const volatile uint32_t *>(&header.bytes);
  out->kind = *const_cast<const volatile RecordKind *>(&header.kind);
  out->head.tag = *const_cast<const volatile uint32_t *>(&header.tag);
  out->head.dtype = *const_cast<const volatile int16_t *>(&header.dtype);
  out->head.count = *const_cast<const volatile uint64_t *>(&header.count);
  out->offset = *const_cast<const volatile uint64_t *>(&header.offset);
  out->data = reinterpret_cast<const char *>(&header + 1);
}

class RingEnd {
 public:
  // fenced_by_sleepers: see store_and_wake. `first`: where the counts of lines and of credit begin
  // (Group::first_count).
  void open(char *ring, size_t bytes, bool fenced_by_sleepers, uint32_t first = 0) {
    fenced_ = fenced_by_sleepers;
    header_ = reinterpret_cast<RingHeader *>(ring);
    data_ = ring + sizeof(RingHeader);
    lines_ = static_cast<uint32_t>(bytes / kLine);
    next_ = charged_ = returned_ = first;
  }

 protected:
  RecordHeader *at(uint32_t line) const {
    return reinterpret_cast<RecordHeader *>(data_ + static_cast<size_t>(line & (lines_ - 1)) * kLine);
  }
  size_t most_bytes(uint32_t line) const {  // of a record that begins there
    const size_t to_end = (lines_ - (line & (lines_ - 1))) * kLine - sizeof(RecordHeader);
    return to_end < kPieceBytes ? to_end : kPieceBytes;
  }

  RingHeader *header_ = nullptr;
  char *data_ = nullptr;
  uint32_t lines_ = 0;
  // These count from the beginning, modulo 2^32.
  uint32_t next_ = 0;      // lines that this end has written or read
  uint32_t charged_ = 0;   // bytes of credit used
  uint32_t returned_ = 0;  // bytes of credit given back, as far as this end knows
  bool fenced_ = false;
};

class RingWriter : public RingEnd {
 public:
  void open(char *ring, size_t bytes, bool fenced_by_sleepers, uint32_t first = 0) {
    RingEnd::open(ring, bytes, fenced_by_sleepers, first);
    known_taken_ = first;
  }
  // Writes a record with as many of the record.bytes bytes at record.data as fit, and sets `taken` to their number: at
  // least one, unless record.bytes is 0.
  RingResult put(const Record &record, size_t *taken);
  // Uses credit for an eager message. kNothing: there is not enough.
  RingResult charge(uint32_t cost, size_t credit);

 private:
  uint32_t known_taken_ = 0;  // lines that the receiver has read, when last looked at
};

class RingReader : public RingEnd {
 public:
  // The next record, which stays until `release`.
  RingResult peek(Record *out) const;
  void release(const Record &record);
  // Notes that the peer has used credit. False if it used more than it had.
  bool charge(uint32_t cost, size_t credit) {
    charged_ += cost;
    return charged_ - returned_ <= credit;
  }
  void give_back(uint32_t cost) {
    returned_ += cost;
    header_->returned.store(returned_, std::memory_order_relaxed);  // pairs with the load in RingWriter::charge
  }
};

}  // namespace phx
