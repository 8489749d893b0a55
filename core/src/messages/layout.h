// The shared layout of messages: each rank has one area, which it reads, and a ring in it for each rank that sends to
// it.
//
//   MessageArea | ring from group rank 0 | ring from group rank 1 | ...          ring = RingHeader | data
//
// A ring holds records that lie one after another in whole cache lines, and a message is a sequence of records: cut
// where the ring ends, and into pieces when it is large. Each record begins with a flag that its sender writes last, in
// the line that also has the first bytes, so that a small message costs the receiver one cache miss per line and no
// other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "group/control.h"
#include "wait/wait.h"

namespace phx {

struct alignas(kLine) MessageArea {
  SharedWord doorbell;  // grows whenever there is something for a sleeping owner: a record, room, or an end
  SharedWord sleepers;  // threads of the owner that sleep on it, or are about to
};
static_assert(sizeof(MessageArea) == kLine);

struct alignas(kLine) RingHeader {
  SharedWord taken;  // lines that the receiver has read since the beginning, modulo 2^32
};
static_assert(sizeof(RingHeader) == kLine);

// What a message is; in each of its records, so that a broken one is noticed.
struct MessageHead {
  uint32_t tag;
  int32_t dtype;
  uint64_t count;
  bool operator==(const MessageHead &o) const { return tag == o.tag && dtype == o.dtype && count == o.count; }
};

struct RecordHeader {
  SharedWord flag;  // 0 until the record is whole; then its place in the stream, see ring.cpp
  uint32_t bytes;   // of the message, in this record
  MessageHead head;
  uint64_t offset;  // of these bytes in the message
};
static_assert(sizeof(RecordHeader) == 32 && kLine % sizeof(RecordHeader) == 0);

// The largest piece. Both sides copy at once, so a ring must hold several.
inline constexpr size_t kPieceBytes = size_t{32} << 10;
inline constexpr size_t kMaxRingBytes = size_t{512} << 10;  // of data; a power of two, as all ring sizes
inline constexpr size_t kMinRingBytes = 4 * kPieceBytes;
inline constexpr size_t kMaxAreaBytes = size_t{32} << 20;  // beyond it rings shrink

inline constexpr size_t ring_bytes(int group_size) {
  size_t bytes = kMaxRingBytes;
  while (bytes > kMinRingBytes && bytes * static_cast<size_t>(group_size) > kMaxAreaBytes) bytes /= 2;
  return bytes;
}
inline constexpr size_t ring_stride(int group_size) { return sizeof(RingHeader) + ring_bytes(group_size); }
static_assert((kMaxRingBytes & (kMaxRingBytes - 1)) == 0 && (kMinRingBytes & (kMinRingBytes - 1)) == 0);

}  // namespace phx
