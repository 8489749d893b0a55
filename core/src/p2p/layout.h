// The shared layout of messages: each rank has one area, which it reads, and a ring in it for each rank that sends to
// it.
//
//   MessageArea | ring from group rank 0 | ring from group rank 1 | ...          ring = RingHeader | data
//
// A ring holds records that lie one after another in whole cache lines. Each record begins with a flag that its sender
// writes last, in the line that also has the first bytes, so that a small message costs the receiver one cache miss per
// line and no other.
//
// A message begins with an EAGER or an RTS record, and the receiver matches messages in the order of these:
//
//   EAGER  (tag, dtype, count)         a small message: all of its data comes without a receive that asks for it
//   RTS    (tag, dtype, count, eager)  ready to send: `eager` bytes come at once, the others stay with the sender
//   CTS    (number)                    clear to send, in the other direction: message `number` has met its receive
//   DATA   (number, offset)            more data of a message, where one record does not take all that may come
//
// The number of a message is its place among the messages of its sender to its receiver, and is not written: both count
// EAGER and RTS records. What comes without a receive is bounded by credit: the sender counts the bytes that it has
// sent eagerly, the receiver gives them back in RingHeader::returned once they lie in the buffer of a receive, and a
// sender that has no credit sends an RTS with no data. So every ring can be emptied at any time, and neither a CTS nor
// a message that a receive waits for is ever stuck behind others.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/wait.h"
#include "group/control.h"

namespace phx {

struct alignas(kLine) MessageArea {
  SharedWord doorbell;  // grows whenever there is something for a sleeping owner: a record, room, or an end
  SharedWord sleepers;  // threads of the owner that sleep on it, or are about to
};
static_assert(sizeof(MessageArea) == kLine);

struct alignas(kLine) RingHeader {
  SharedWord taken;     // lines that the receiver has read since the beginning, modulo 2^32
  SharedWord returned;  // bytes of credit that the receiver has given back since the beginning, modulo 2^32
};
static_assert(sizeof(RingHeader) == kLine);

// What a message is.
struct MessageHead {
  uint32_t tag;
  int32_t dtype;
  uint64_t count;
  bool operator==(const MessageHead &o) const { return tag == o.tag && dtype == o.dtype && count == o.count; }
};

enum class RecordKind : uint16_t { kEager = 1, kRts = 2, kCts = 3, kData = 4 };

struct RecordHeader {
  SharedWord flag;  // 0 until the record is whole; then its place in the stream, see ring.cpp
  uint32_t bytes;   // of data in this record
  uint32_t tag;     // CTS and DATA: the number of the message
  int16_t dtype;
  RecordKind kind;
  uint64_t count;
  uint64_t offset;  // DATA: of these bytes in the message; RTS: how many bytes come without a CTS
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

// What a rank takes from one other without a receive. A whole ring of data may come eagerly, so that a message whose
// receive waits already streams until its CTS is there. Twice a ring, because all that a ring holds must be within the
// credit: a slow receiver alone must not turn small messages into RTS.
inline constexpr size_t eager_bytes(int group_size) { return ring_bytes(group_size); }
inline constexpr size_t credit_bytes(int group_size) { return 2 * ring_bytes(group_size); }
inline constexpr uint32_t eager_cost(size_t bytes) { return static_cast<uint32_t>(bytes + kLine); }  // with its record
inline constexpr uint32_t kMaxAnnounced = 1u << 16;  // messages from one rank to another with an RTS and no CTS yet

}  // namespace phx
