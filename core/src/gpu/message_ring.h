// What the kernel that sends and receives shares with the host: the rings that messages take, and what a launch moves.
//
// A ring goes from one rank to one other. Its memory is the sender's, and the receiver maps it: the sender copies into
// it, and the receiver fetches from there. So a send needs nothing of the other rank before there is room no more.
//
// A ring has lanes, which have nothing to do with each other: each carries a stretch of every message that is long
// enough to reach it, chunk after chunk, through kDeep slots that take turns. Both sides count the chunks of a lane; a
// count only grows (modulo 2^32), so that nothing is reset and a launch can be replayed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/portable.h"

namespace phx::cuda {

constexpr uint32_t kLanes = 16;
constexpr uint32_t kDeep = 4;
constexpr uint32_t kMostRings = 32;     // of a launch
constexpr uint32_t kMostMessages = 96;  // likewise: they travel in the kernel's parameters

// What a message says of itself: where two that meet differ, neither is delivered.
struct Label {
  uint64_t bytes;
  uint32_t tag;
  uint32_t dtype;
};

struct alignas(128) RingWord {
  uint32_t word;
};
struct alignas(128) Refusal {
  uint32_t word;  // not 0: the receiver expected another message, and the labels are there
  Label sent, expected;
};
// The memory of a ring, before its slots. It begins with the counters.
struct GpuMessageRingHead {
  RingWord put[kLanes];     // chunks in the slots so far: written by the sender
  RingWord taken[kLanes];   // chunks fetched so far: written by the receiver
  Refusal refused[kLanes];  // likewise
};

static_assert(sizeof(GpuMessageRingHead) >= 2 * kLanes * sizeof(RingWord) &&
              alignof(GpuMessageRingHead) == alignof(RingWord));

// How far a rank's own end of a lane is. `chunks` stays from launch to launch; the rest is of one.
struct alignas(16) Cursor {
  uint32_t chunks;
  uint32_t message;
  uint32_t chunk;  // of that message, on this lane
  uint32_t reserved;
};

// A ring as a launch uses it: messages [first, end) of its list, in this order.
struct GpuMessageRing {
  char *memory;
  Cursor *cursors;  // kLanes of them
  uint32_t chunk_bytes;
  int32_t rank;  // the other one
  int32_t sends;
  uint16_t first, end;
};
struct Message {
  char *data;
  Label label;
};

// One launch on one rank.
struct Exchange {
  const int32_t *gone;  // as phx_team.failed
  uint32_t *failed;     // as Launch::failed; after it kDifferenceWords, see tell_difference
  uint64_t timeout_ns;
  int32_t group_size;
  uint32_t rings;
  uint32_t lanes;  // that the longest message takes
  GpuMessageRing ring[kMostRings];
  Message message[kMostMessages];
};
static_assert(sizeof(Exchange) <= 4096, "more than a launch may pass");

// Two labels, after the word of failures: that of the sender first.
constexpr size_t kDifferenceWords = 2 * sizeof(Label) / sizeof(uint32_t);
// What goes into that word: the message that this rank receives differs from what the other one sends, or the reverse;
// or the other one has gone and left a message unfinished.
PHX_PORTABLE constexpr int32_t sends_other(int32_t group_size, int32_t group_rank) {
  return 3 * group_size + 1 + group_rank;
}
PHX_PORTABLE constexpr int32_t receives_other(int32_t group_size, int32_t group_rank) {
  return 4 * group_size + 1 + group_rank;
}
PHX_PORTABLE constexpr int32_t has_gone(int32_t group_size, int32_t group_rank) {
  return 5 * group_size + 1 + group_rank;
}

PHX_PORTABLE constexpr size_t slot_bytes(uint32_t chunk_bytes) { return sizeof(Label) + chunk_bytes; }
PHX_PORTABLE constexpr size_t ring_bytes(uint32_t chunk_bytes) {
  return sizeof(GpuMessageRingHead) + kLanes * kDeep * slot_bytes(chunk_bytes);
}
// Shorter stretches are not worth a lane. A multiple of 16, as a chunk is.
PHX_PORTABLE constexpr uint32_t least_stretch(uint32_t chunk_bytes) { return (chunk_bytes / 8 + 15) / 16 * 16; }
// How many lanes carry a message of so many bytes. Sender and receiver count on it, so it depends on nothing else.
PHX_PORTABLE constexpr uint32_t lanes_of(uint64_t bytes, uint32_t chunk_bytes) {
  const uint64_t stretches = (bytes + least_stretch(chunk_bytes) - 1) / least_stretch(chunk_bytes);
  return stretches >= kLanes ? kLanes : stretches == 0 ? 1 : static_cast<uint32_t>(stretches);
}

}  // namespace phx::cuda
