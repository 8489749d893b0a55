// What the kernels on symmetric memory have in common: where the ranks' blocks are, and how ranks meet.
//
// Each block of threads meets the blocks of the same number on the other ranks, twice. After the first time every
// rank's kernel has begun, and so what that rank's stream had to do before it is done: all inputs are there. After the
// second time nobody reads or writes any more, block by block, and the launch is over when all of its blocks have met.
#pragma once

#include "gpu/block.h"

namespace phx::cuda {

namespace {

// Where results are written that go to the blocks.
PHX_DEVICE char *result_at(const Launch &launch, int rank, size_t bytes) {
  return static_cast<char *>(launch.team.buffers[rank]) + launch.offset + bytes;
}
PHX_DEVICE char **found_inputs(const Launch &launch) {
  return launch.inputs.found + static_cast<size_t>(block_of_grid()) * launch.team.group_size;
}
// A part of a rank's input.
PHX_DEVICE char *block_at(const Launch &launch, int rank, size_t bytes) {
  return launch.inputs.apart != 0 ? found_inputs(launch)[rank] + bytes : result_at(launch, rank, bytes);
}

// All threads of the block get the same answer.
PHX_DEVICE bool all_meet(const Launch &launch) {
  const int32_t status = meet(&launch.team, launch.channel, launch.timeout_ns);
  if (status != 0 && thread_of_block() == 0) phx_word_put(launch.failed, static_cast<uint32_t>(status));
  return status == 0;
}

// Where a rank's input is, by what it says. NULL: where this rank has nothing any more.
PHX_DEVICE char *find_input(const Launch &launch, int rank) {
  const Pack pack = load_pack(reinterpret_cast<char *>(launch.team.pads[rank]) + launch.inputs.shown +
                              block_of_grid() * sizeof(Where));
  Where where;
  std::memcpy(&where, &pack, sizeof where);
  if (where.memory == 0) return result_at(launch, rank, where.offset);
  const uint64_t ordinal = where.memory - 1, end = launch.inputs.end;
  const bool listed = ordinal < end && ordinal + kKnown >= end;
  void *const *const blocks = listed ? launch.inputs.known[ordinal % kKnown] : nullptr;
  return blocks == nullptr ? nullptr : static_cast<char *>(blocks[rank]) + where.offset;
}

// The first meeting of a collective: after it all inputs are there, and block_at says where. All threads get the same
// answer.
PHX_DEVICE bool all_come(const Launch &launch) {
  if (launch.inputs.apart == 0) return all_meet(launch);
  const int n = launch.team.group_size;
  if (thread_of_block() == 0) {
    Pack pack;
    std::memcpy(&pack, &launch.inputs.own, sizeof pack);
    store_pack(reinterpret_cast<char *>(launch.team.pads[launch.team.group_rank]) + launch.inputs.shown +
                   block_of_grid() * sizeof(Where),
               pack);
  }
  if (!all_meet(launch)) return false;
  char **const found = found_inputs(launch);
  for (int rank = static_cast<int>(thread_of_block()); rank < n; rank += static_cast<int>(threads_of_block()))
    found[rank] = find_input(launch, rank);
  sync_block();
  bool all = true;
  for (int rank = 0; rank < n; ++rank) {
    if (found[rank] != nullptr) continue;
    all = false;
    if (thread_of_block() == 0) phx_word_put(launch.failed, static_cast<uint32_t>(has_freed(n, rank)));
  }
  if (!all) all_meet(launch);  // the others go on
  return all;
}

PHX_DEVICE char *spread_at(const Launch &launch, int rank, size_t bytes) {
  return static_cast<char *>(launch.spread.team.buffers[rank]) + launch.spread.offset + bytes;
}

// What a rank's block of threads tells those of the same number on the others, before they meet.
PHX_DEVICE char *part_at(const Launch &launch, int of, int to) {
  char *const parts = reinterpret_cast<char *>(launch.team.pads[of]) + launch.parts;
  return parts + (static_cast<size_t>(block_of_grid()) * launch.team.group_size + to) * sizeof(Part);
}

// Before ranks meet: shows where this one has its result.
PHX_DEVICE void show_place(const Launch &launch) {
  if (thread_of_block() != 0) return;
  const Part shown{launch.spread.place, 0};
  Pack pack;
  std::memcpy(&pack, &shown, sizeof pack);
  store_pack(part_at(launch, launch.team.group_rank, launch.team.group_rank), pack);
}
// After it: whether all have shown the same. They all get the same answer.
PHX_DEVICE bool in_one_place(const Launch &launch) {
  bool same = true;
  for (int rank = 0; rank < launch.team.group_size; ++rank) {
    const Pack pack = load_pack(part_at(launch, rank, rank));
    Part shown;
    std::memcpy(&shown, &pack, sizeof shown);
    same = same && shown.start == launch.spread.place;
  }
  return same;
}

PHX_DEVICE char *out_at(const Launch &launch, size_t bytes) { return static_cast<char *>(launch.out) + bytes; }

// Whether this rank has an output.
PHX_DEVICE bool receives(const Launch &launch) { return launch.root < 0 || launch.root == launch.team.group_rank; }

// All ranks one after the other, beginning with this one.
template <class Function>
PHX_DEVICE void for_each_rank(const Launch &launch, const Function &function) {
  const int n = launch.team.group_size;
  for (int i = 0; i < n; ++i) function((launch.team.group_rank + i) % n);
}

// The answer for one rank's block holds for all: an allocation has the same alignment on every rank, and so has an
// offset into it.
PHX_DEVICE bool is_aligned(const void *at) { return (reinterpret_cast<uintptr_t>(at) & (sizeof(Pack) - 1)) == 0; }

PHX_DEVICE bool inputs_are_aligned(const Launch &launch, size_t bytes) {
  bool aligned = is_aligned(block_at(launch, 0, bytes));
  if (launch.inputs.apart != 0)
    for (int rank = 1; rank < launch.team.group_size; ++rank) aligned &= is_aligned(block_at(launch, rank, bytes));
  return aligned;
}

}  // namespace
}  // namespace phx::cuda
