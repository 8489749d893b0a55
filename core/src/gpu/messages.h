// Messages between two ranks: what one launch does on one rank.
//
// All sends and receives of a launch progress at the same time, whatever the number of blocks: a block has its share of
// the lanes of all rings, and moves a chunk wherever one can move. So no order of sends and receives within a launch
// can block it, and neither can a block that waits for a processor.
#pragma once

#include "gpu/block.h"
#include "gpu/message_ring.h"

namespace phx::cuda {

namespace {

// This rank's end of a lane, on which one block works.
struct LaneEnd {
  const GpuMessageRing &ring;
  uint32_t lane;
  GpuMessageRingHead *head;
  Cursor *cursor;
};

PHX_DEVICE LaneEnd lane_end(const Exchange &launch, uint32_t work) {
  const GpuMessageRing &ring = launch.ring[work % launch.rings];
  const uint32_t lane = work / launch.rings;
  return {ring, lane, reinterpret_cast<GpuMessageRingHead *>(ring.memory), ring.cursors + lane};
}

PHX_DEVICE char *slot_of(const LaneEnd &end, uint32_t chunk) {
  const size_t number = end.lane * kDeep + chunk % kDeep;
  return end.ring.memory + sizeof(GpuMessageRingHead) + number * slot_bytes(end.ring.chunk_bytes);
}

// The bytes of a message that are one chunk of a lane.
struct Piece {
  uint64_t begin;
  uint32_t size;
  bool is_last;
};
PHX_DEVICE Piece piece_of(uint64_t bytes, const LaneEnd &end, uint32_t chunk) {
  const uint32_t lanes = lanes_of(bytes, end.ring.chunk_bytes);
  const uint64_t share = ((bytes + lanes - 1) / lanes + sizeof(Pack) - 1) / sizeof(Pack) * sizeof(Pack);
  const uint64_t from = share * end.lane < bytes ? share * end.lane : bytes;
  const uint64_t stretch = share < bytes - from ? share : bytes - from;
  const uint64_t before = static_cast<uint64_t>(chunk) * end.ring.chunk_bytes, left = stretch - before;
  const bool is_last = left <= end.ring.chunk_bytes;
  return {from + before, is_last ? static_cast<uint32_t>(left) : end.ring.chunk_bytes, is_last};
}

// The first message of the ring, from `message` on, that is long enough to reach this lane.
PHX_DEVICE uint32_t next_message(const Exchange &launch, const LaneEnd &end, uint32_t message) {
  while (message < end.ring.end && lanes_of(launch.message[message].label.bytes, end.ring.chunk_bytes) <= end.lane)
    ++message;
  return message;
}

PHX_DEVICE bool can_move(const LaneEnd &end, uint32_t chunks) {
  if (end.ring.sends != 0)
    return static_cast<int32_t>(chunks - phx_word_get(&end.head->taken[end.lane].word)) < static_cast<int32_t>(kDeep);
  return static_cast<int32_t>(phx_word_get(&end.head->put[end.lane].word) - chunks) > 0;
}

PHX_DEVICE void give_up(const Exchange &launch, int32_t status) {
  phx_word_put(launch.failed, static_cast<uint32_t>(status));
}

// Reports two labels that differ, from which the host makes an error. Only the first failure is reported.
PHX_DEVICE void tell_difference(const Exchange &launch, int32_t code, const Label &sent, const Label &expected) {
  if (phx_word_get(launch.failed) != 0) return;
  uint32_t words[kDifferenceWords];
  std::memcpy(words, &sent, sizeof sent);
  std::memcpy(words + kDifferenceWords / 2, &expected, sizeof expected);
  for (size_t i = 0; i < kDifferenceWords; ++i) phx_word_put(launch.failed + 1 + i, words[i]);
  give_up(launch, code);
}

// Called by one thread: waits until a chunk can move on one of the block's lanes, looking first at the lanes behind
// `after`, and returns that lane. -1: all messages are complete, or a failure was reported.
PHX_DEVICE int32_t next_work(const Exchange &launch, uint32_t after) {
  const uint32_t works = launch.rings * launch.lanes, step = blocks_of_grid();
  uint64_t begun = 0;
  for (uint32_t looks = 1;; ++looks) {
    const bool checks = looks % 64 == 0;
    int32_t waits_for = -1;
    uint32_t work = after;
    do {
      work = works - work > step ? work + step : block_of_grid();
      const LaneEnd end = lane_end(launch, work);
      if (end.cursor->message == end.ring.end) continue;
      if (can_move(end, end.cursor->chunks)) return static_cast<int32_t>(work);
      if (waits_for < 0) waits_for = end.ring.rank;
      if (!checks) continue;
      const Refusal &refused = end.head->refused[end.lane];
      if (end.ring.sends != 0 && phx_word_get(&refused.word) != 0) {
        tell_difference(launch, report(Report::kReceivesOther, launch.group_size, end.ring.rank), refused.sent,
                        refused.expected);
        return -1;
      }
      // The peer may have done its part before it left.
      const bool gone = phx_word_get(reinterpret_cast<const uint32_t *>(launch.gone) + end.ring.rank) != 0;
      if (gone && !can_move(end, end.cursor->chunks)) {
        if (phx_word_get(launch.failed) == 0) give_up(launch, report(Report::kGone, launch.group_size, end.ring.rank));
        return -1;
      }
    } while (work != after);
    if (waits_for < 0) return -1;
    if (checks) {
      if (phx_word_get(launch.failed) != 0) return -1;  // another block has reported a failure
      const uint64_t now = phx_private_clock_ns();
      if (begun == 0) begun = now;
      if (now - begun > launch.timeout_ns) {
        give_up(launch, 1 + waits_for);
        return -1;
      }
    }
    phx_private_pause(looks);
  }
}

// Like copy_by_block, with more loads in flight, because few blocks have to fill a link.
PHX_DEVICE void copy_chunk(char *to, const char *from, uint32_t bytes) {
  constexpr uint32_t kAtOnce = 4, kPack = sizeof(Pack);
  const bool aligned = ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) & (kPack - 1)) == 0;
  const uint32_t whole = aligned ? bytes / kPack * kPack : 0, stride = threads_of_block() * kPack;
  uint32_t at = thread_of_block() * kPack;
  for (; at + (kAtOnce - 1) * stride < whole; at += kAtOnce * stride) {
    Pack packs[kAtOnce];
    for (uint32_t i = 0; i < kAtOnce; ++i) packs[i] = load_pack(from + at + i * stride);
    for (uint32_t i = 0; i < kAtOnce; ++i) store_pack(to + at + i * stride, packs[i]);
  }
  for (; at < whole; at += stride) store_pack(to + at, load_pack(from + at));
  for (at = whole + thread_of_block(); at < bytes; at += threads_of_block()) to[at] = from[at];
}

// Whether the slot has a chunk of the expected message; reports it if not. Returns the same to all threads.
PHX_DEVICE bool is_expected(const Exchange &launch, const LaneEnd &end, const char *slot, const Label &expected) {
  const auto sent = load_as<Label>(slot);
  if (sent.bytes == expected.bytes && sent.tag == expected.tag && sent.dtype == expected.dtype) return true;
  if (thread_of_block() == 0) {
    Refusal &refused = end.head->refused[end.lane];
    refused.sent = sent;
    refused.expected = expected;
    phx_word_put(&refused.word, 1);
    tell_difference(launch, report(Report::kSendsOther, launch.group_size, end.ring.rank), sent, expected);
  }
  return false;
}

// Moves one chunk. False: it is not of the message that is expected.
PHX_DEVICE bool move_chunk(const Exchange &launch, const LaneEnd &end) {
  const Cursor at = *end.cursor;
  const Message &message = launch.message[at.message];
  const Piece piece = piece_of(message.label.bytes, end, at.chunk);
  char *const slot = slot_of(end, at.chunks);
  char *const data = slot + sizeof(Label);
  const bool sends = end.ring.sends != 0;
  if (sends) {
    if (thread_of_block() == 0) store_as(slot, message.label);
    copy_chunk(data, message.data + piece.begin, piece.size);
  } else {
    if (!is_expected(launch, end, slot, message.label)) return false;
    copy_chunk(message.data + piece.begin, data, piece.size);
  }
  sync_block();
  if (thread_of_block() == 0) {
    send_out();  // the other threads' writes
    phx_word_put(sends ? &end.head->put[end.lane].word : &end.head->taken[end.lane].word, at.chunks + 1);
    *end.cursor = {at.chunks + 1, piece.is_last ? next_message(launch, end, at.message + 1) : at.message,
                   piece.is_last ? 0 : at.chunk + 1, 0};
  }
  return true;
}

PHX_DEVICE void exchange_messages(const Exchange &launch) {
  const uint32_t works = launch.rings * launch.lanes;
  if (thread_of_block() == 0)
    for (uint32_t work = block_of_grid(); work < works; work += blocks_of_grid()) {
      const LaneEnd end = lane_end(launch, work);
      *end.cursor = {end.cursor->chunks, next_message(launch, end, end.ring.first), 0, 0};
    }
  int32_t work = static_cast<int32_t>(block_of_grid());
  for (;;) {
    if (thread_of_block() == 0) work = next_work(launch, static_cast<uint32_t>(work));
    work = from_first(work);
    if (work < 0 || !move_chunk(launch, lane_end(launch, static_cast<uint32_t>(work)))) return;
  }
}

}  // namespace
}  // namespace phx::cuda
