// The shared layout of a group: one control segment per rank, written by its owner and mapped by every rank.
//
//   ControlHeader | lane 0 | lane 1 | ... | area for messages
//   lane = LaneHeader | slot 0 | ... | slot kSlots-1 | history
//   slot = SlotHeader | slot_bytes of data
//
// Each channel of the group has a lane. A collective moves through `epochs` of its lane: numbers that every rank counts
// alike. Publishing epoch e makes slot e % kSlots readable; its header says what call it belongs to, so that every
// arrival carries its fingerprint. Memory comes with use: of a new group, only the pages with the headers of the first
// lane's slots are resident (Lane::hold).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/wait.h"
#include "group/call_record.h"

namespace phx {

inline constexpr uint64_t kControlMagic = 0x4c4f52544e4f4350ull;  // "PCONTROL"
inline constexpr uint32_t kSlots = 4;
inline constexpr size_t kLine = 64;
inline constexpr int kMaxGroupSize = 1024;  // ranks of one host; bounds arrays on the stack

struct alignas(kLine) SlotHeader {
  SharedWord epoch;  // written last, with release; all below is ordered by it
  uint32_t done;     // the owner reads no slot of an epoch <= done any more
  CallRecord record;
  InputLocation place;
  // Reaches the epoch once the slot has the data: with it, or after a look at everybody's place. Every publication
  // stores it: a word that stayed behind by 2^31 epochs would count as reached.
  SharedWord staged;
  uint8_t reserved[12];
};
static_assert(sizeof(SlotHeader) == kLine);

struct alignas(kLine) LaneHeader {
  alignas(kLine) SharedWord done;      // as in SlotHeader, for ranks that publish nothing for a while
  alignas(kLine) SharedWord sleepers;  // peers that sleep on words of this lane
  SharedWord core;                     // where the owner last published (see current_core), if ranks share cores
};
static_assert(sizeof(LaneHeader) == 2 * kLine);

struct alignas(kLine) ControlHeader {
  uint64_t magic;
  uint64_t slot_bytes;
  uint64_t group_id;
  int32_t group_rank;
  int32_t group_size;
  uint32_t channels;
  uint32_t recorder_entries;
};
static_assert(sizeof(ControlHeader) == kLine);

inline size_t slot_stride(size_t slot_bytes) { return sizeof(SlotHeader) + slot_bytes; }
// The counters of a lane begin at `first` (Group::first_count). Its owner does this before any peer maps the lane.
// `staged` stays 0, as if it had not been written for `first` epochs: no rule may rely on a word that is not kept
// moving.
inline void begin_lane_at(char *lane, size_t slot_bytes, uint32_t first) {
  reinterpret_cast<LaneHeader *>(lane)->done.store(first, std::memory_order_relaxed);
  for (uint32_t i = 0; i < kSlots; ++i) {
    char *const slot = lane + sizeof(LaneHeader) + i * slot_stride(slot_bytes);
    reinterpret_cast<SlotHeader *>(slot)->epoch.store(first, std::memory_order_relaxed);
  }
}
inline size_t history_offset(size_t slot_bytes) {
  return sizeof(LaneHeader) + kSlots * slot_stride(slot_bytes);
}  // in a lane
inline size_t slot_offset(uint32_t slot, size_t slot_bytes) {
  return sizeof(ControlHeader) + sizeof(LaneHeader) + slot * slot_stride(slot_bytes);
}  // of the first lane, in the segment
inline size_t lane_bytes(size_t slot_bytes, uint32_t recorder_entries) {
  return history_offset(slot_bytes) + recorder_entries * kLine;  // of one line each
}
inline size_t lane_offset(uint32_t channel, size_t slot_bytes, uint32_t recorder_entries) {
  return sizeof(ControlHeader) + channel * lane_bytes(slot_bytes, recorder_entries);
}

}  // namespace phx
