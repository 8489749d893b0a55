// The shared layout of a group: one control segment per rank, written by its owner and mapped by every rank.
//
//   ControlHeader | lane 0 | lane 1 | ... | areas of attachments
//   lane = LaneHeader | slot 0 | ... | slot kSlots-1 | history
//   slot = SlotHeader | slot_bytes of data
//
// Each channel of the group has a lane. Each round of a collective is an epoch of its lane, and all ranks count epochs
// in the same way. Publishing epoch e makes slot e % kSlots readable. Its header has the record of the call, so that
// ranks compare their calls at every arrival. Memory becomes resident with use: in a new group, only the pages with the
// headers of the first lane's slots are (Lane::hold).
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
  SharedWord epoch;  // written last, with release, which orders all fields below
  uint32_t done;     // the owner no longer reads slots of epochs up to this one
  CallRecord record;
  InputLocation place;
  // Reaches the epoch once the slot has the data: together with `epoch`, or in publish_staged if the slot was published
  // empty. Every publication stores it, because a word that fell behind by 2^31 epochs would count as reached.
  SharedWord staged;
  uint64_t even;  // Operation::even
};
static_assert(sizeof(SlotHeader) == kLine);

struct alignas(kLine) LaneHeader {
  alignas(kLine) SharedWord done;      // as in SlotHeader, in case the owner does not publish for a while
  alignas(kLine) SharedWord sleepers;  // peers that sleep on words of this lane
  SharedWord core;                     // of the owner's last publication (see current_core), if ranks share cores
};
static_assert(sizeof(LaneHeader) == 2 * kLine);

// The layout of a segment follows from its header.
struct alignas(kLine) ControlHeader {
  uint64_t magic;
  uint64_t slot_bytes;
  uint64_t group_id;
  int32_t group_rank;
  int32_t group_size;
  uint32_t channels;
  uint32_t recorder_entries;

  size_t slot_stride() const { return sizeof(SlotHeader) + slot_bytes; }
  size_t lane_offset(uint32_t channel) const {
    // An entry of the recorder takes one line.
    return sizeof(ControlHeader) + channel * (sizeof(LaneHeader) + kSlots * slot_stride() + recorder_entries * kLine);
  }
  // The offset of the areas of attachments.
  size_t lanes_end() const { return lane_offset(channels); }
  // Sets the counters of a lane to `first` (Group::first_count). The owner calls it before any peer maps the lane.
  // `staged` stays 0, as if it had not been written for `first` epochs: no code may rely on a word that is rarely
  // stored.
  void begin_lane_at(char *lane, uint32_t first) const {
    reinterpret_cast<LaneHeader *>(lane)->done.store(first, std::memory_order_relaxed);
    for (uint32_t i = 0; i < kSlots; ++i) {
      char *const slot = lane + sizeof(LaneHeader) + i * slot_stride();
      reinterpret_cast<SlotHeader *>(slot)->epoch.store(first, std::memory_order_relaxed);
    }
  }
};
static_assert(sizeof(ControlHeader) == kLine);

}  // namespace phx
