// The shared layout of messages: each rank has one area, which it reads and which has a ring for each sender.
//
//   MessageArea | ring from group rank 0 | ring from group rank 1 | ...          ring = RingHeader | data
//
// A ring holds records one after another, in whole cache lines. Each record begins with a flag, which its sender writes
// last, in the line that also has the first bytes. So a small message costs the receiver one cache miss per line and no
// more.
//
// A message begins with an EAGER or an RTS record, and the receiver matches messages in the order of these:
//
//   EAGER  (tag, dtype, count)         a small message: all of its data is sent without a matching receive
//   RTS    (tag, dtype, count, eager)  ready to send: `eager` bytes are sent at once, the others stay with the sender
//   CTS    (number)                    clear to send, in the other direction: message `number` has a matching receive
//   DATA   (number, offset)            more data of a message, if one record cannot hold all that may be sent
//   CREDIT (bytes)                     between hosts only: what RingHeader::returned says in shared memory
//
// The number of a message is not in its first record: sender and receiver both count the EAGER and RTS records of their
// ring. Credit bounds the data that is sent without a matching receive. The sender counts the bytes that it has sent
// eagerly, the receiver gives them back in RingHeader::returned once they lie in the buffer of a receive, and a sender
// without credit sends an RTS without data. So every ring can be emptied at any time, and neither a CTS nor a message
// that a receive waits for is ever stuck behind others.
#pragma once

#include "base/wait.h"
#include "group/control.h"

namespace phx {

struct alignas(kLine) MessageArea {
  SharedWord doorbell;  // incremented to wake a sleeping owner: for a record, for room, or for a completed transfer
  SharedWord sleepers;  // threads of the owner that sleep on it, or are about to
};
static_assert(sizeof(MessageArea) == kLine);

struct alignas(kLine) RingHeader {
  SharedWord taken;     // lines that the receiver has read since the beginning, modulo 2^32
  SharedWord returned;  // bytes of credit that the receiver has given back since the beginning, modulo 2^32
};
static_assert(sizeof(RingHeader) == kLine);

// The envelope of a message, in which a send and its receive must be equal.
struct MessageHead {
  uint32_t tag;
  int32_t dtype;
  uint64_t count;
  bool operator==(const MessageHead &o) const { return tag == o.tag && dtype == o.dtype && count == o.count; }
};

// The last three are those of windows (p2p/window.h), which have rings of their own.
enum class RecordKind : uint16_t {
  kEager = 1,
  kRts = 2,
  kCts = 3,
  kData = 4,
  kCredit = 5,
  kPut = 6,
  kGet = 7,
  kReply = 8
};

struct RecordHeader {
  SharedWord flag;  // 0 until the record is complete, then derived from its place in the stream (flag_of)
  uint32_t bytes;   // of data in this record
  uint32_t tag;     // CTS and DATA: the number of the message
  int16_t dtype;
  RecordKind kind;
  uint64_t count;
  uint64_t offset;  // DATA: of these bytes in the message; RTS: how many bytes come without a CTS
};
static_assert(sizeof(RecordHeader) == 32 && kLine % sizeof(RecordHeader) == 0);

// The most data in a record. Both sides copy at the same time, so a ring must hold several records of this size.
inline constexpr size_t kPieceBytes = size_t{32} << 10;
inline constexpr size_t kMaxRingBytes = size_t{512} << 10;  // of data; a power of two, like all ring sizes
inline constexpr size_t kMinRingBytes = 4 * kPieceBytes;
inline constexpr size_t kMaxAreaBytes = size_t{32} << 20;  // larger groups have smaller rings, to stay within it

inline constexpr size_t ring_bytes(int group_size) {
  size_t bytes = kMaxRingBytes;
  while (bytes > kMinRingBytes && bytes * static_cast<size_t>(group_size) > kMaxAreaBytes) bytes /= 2;
  return bytes;
}
inline constexpr size_t ring_stride(int group_size) { return sizeof(RingHeader) + ring_bytes(group_size); }
inline constexpr size_t ring_offset(int from, int group_size) {  // in a MessageArea
  return sizeof(MessageArea) + static_cast<size_t>(from) * ring_stride(group_size);
}
static_assert((kMaxRingBytes & (kMaxRingBytes - 1)) == 0 && (kMinRingBytes & (kMinRingBytes - 1)) == 0);

// How much a rank accepts from one peer without a matching receive. The eager part of a message may fill a ring, so
// that a message whose receive waits already streams until its CTS arrives. The credit is twice a ring, because all
// data in the ring counts against it: a slow receiver alone must not turn small messages into RTS.
inline constexpr size_t credit_bytes(int group_size) { return 2 * ring_bytes(group_size); }
inline constexpr uint32_t eager_cost(size_t bytes) { return static_cast<uint32_t>(bytes + kLine); }  // with its header
inline constexpr uint32_t kMaxAnnounced = 1u << 16;  // messages from one rank to another with an RTS and no CTS yet

}  // namespace phx
