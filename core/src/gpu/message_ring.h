// What the kernel that sends and receives shares with the host: the message rings, and the parameters of a launch.
//
// A ring leads from one rank to one other. It lies in memory of the sender, which copies into it; the receiver maps it
// and fetches from there. So a send needs nothing from the receiver until the ring is full.
//
// A ring has lanes, which are independent of each other. Each lane carries a contiguous part of every message that is
// long enough to reach it, chunk after chunk, through kDeep slots that are used in turn. Both sides count the chunks of
// a lane; a count only grows (modulo 2^32), so that nothing is reset and a launch can be replayed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/portable.h"

namespace phx::cuda {

constexpr uint32_t kLanes = 16;
constexpr uint32_t kDeep = 4;
constexpr uint32_t kMostRings = 32;     // of a launch
constexpr uint32_t kMostMessages = 96;  // of a launch: they are in the parameters of the kernel

// The envelope of a message. If those of a send and its receive differ, nothing is delivered.
struct Label {
  uint64_t bytes;
  uint32_t tag;
  uint32_t dtype;
};

struct alignas(128) RingWord {
  uint32_t word;
};
struct alignas(128) Refusal {
  uint32_t word;  // not 0: the receiver expected another message, and the labels are valid
  Label sent, expected;
};
// The memory of a ring, before its slots. It begins with the counters.
struct GpuMessageRingHead {
  RingWord put[kLanes];     // chunks put into slots so far; written by the sender
  RingWord taken[kLanes];   // chunks fetched so far; written by the receiver
  Refusal refused[kLanes];  // written by the receiver
};

static_assert(sizeof(GpuMessageRingHead) >= 2 * kLanes * sizeof(RingWord) &&
              alignof(GpuMessageRingHead) == alignof(RingWord));

// The progress of this rank's end of a lane. `chunks` stays from launch to launch; the rest is for one launch.
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
  int32_t rank;  // the peer
  int32_t sends;
  uint16_t first, end;
};
struct Message {
  char *data;
  Label label;
};

// The parameters of one launch on one rank.
struct Exchange {
  const int32_t *gone;  // as phx_team.failed
  uint32_t *failed;     // as Launch::failed; after it kDifferenceWords, see tell_difference
  uint64_t timeout_ns;
  int32_t group_size;
  uint32_t rings;
  uint32_t lanes;  // as many as the longest message uses
  GpuMessageRing ring[kMostRings];
  Message message[kMostMessages];
};
static_assert(sizeof(Exchange) <= 4096, "more than a launch may pass");

// The words of two labels, that of the sender first, which follow the word of failures.
constexpr size_t kDifferenceWords = 2 * sizeof(Label) / sizeof(uint32_t);

PHX_PORTABLE constexpr size_t slot_bytes(uint32_t chunk_bytes) { return sizeof(Label) + chunk_bytes; }
PHX_PORTABLE constexpr size_t ring_bytes(uint32_t chunk_bytes) {
  return sizeof(GpuMessageRingHead) + kLanes * kDeep * slot_bytes(chunk_bytes);
}
// The least part of a message that is worth a lane. A multiple of 16, like a chunk.
PHX_PORTABLE constexpr uint32_t least_stretch(uint32_t chunk_bytes) { return (chunk_bytes / 8 + 15) / 16 * 16; }
// How many lanes carry a message of `bytes`. Sender and receiver both compute it, so it depends on nothing else.
PHX_PORTABLE constexpr uint32_t lanes_of(uint64_t bytes, uint32_t chunk_bytes) {
  const uint64_t parts = (bytes + least_stretch(chunk_bytes) - 1) / least_stretch(chunk_bytes);
  return parts >= kLanes ? kLanes : parts == 0 ? 1 : static_cast<uint32_t>(parts);
}

}  // namespace phx::cuda
