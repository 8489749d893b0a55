// What the kernels on symmetric memory have in common: where the blocks of the ranks lie, and the barriers of a launch.
// And the signals and barriers that order streams.
//
// Each block of threads has two barriers with the blocks of the same number on the other ranks. After the first one the
// kernels of all ranks have begun, so what their streams had to do before is done: all inputs are ready. After the
// second one these blocks no longer read or write memory of other ranks. The launch ends when all blocks have passed
// it.
#pragma once

#include "gpu/block.h"

namespace phx::cuda {

namespace {

// Where a result lies that is written to the block of a rank.
PHX_DEVICE char *result_at(const Launch &launch, int rank, size_t bytes) {
  return static_cast<char *>(launch.team.buffers[rank]) + launch.offset + bytes;
}
PHX_DEVICE char **found_inputs(const Launch &launch) {
  return launch.inputs.found + static_cast<size_t>(block_of_grid()) * launch.team.group_size;
}
// Where the input of a rank lies, from byte `bytes` on.
PHX_DEVICE char *block_at(const Launch &launch, int rank, size_t bytes) {
  return launch.inputs.apart != 0 ? found_inputs(launch)[rank] + bytes : result_at(launch, rank, bytes);
}

// A barrier with all ranks. False if it failed, for all threads of the block.
PHX_DEVICE bool team_barrier(const Launch &launch) {
  const int32_t status = block_barrier(&launch.team, launch.channel, launch.timeout_ns);
  if (status != 0 && thread_of_block() == 0) phx_word_put(launch.failed, static_cast<uint32_t>(status));
  return status == 0;
}

// Where a rank publishes where its input lies, in its pad.
PHX_DEVICE char *shown_at(const Launch &launch, int of) {
  return reinterpret_cast<char *>(launch.team.pads[of]) + launch.inputs.shown + block_of_grid() * sizeof(Where);
}

// Where the input of a rank lies, as that rank has published it. NULL: in symmetric memory that this rank has freed.
PHX_DEVICE char *find_input(const Launch &launch, int rank) {
  const auto where = load_as<Where>(shown_at(launch, rank));
  if (where.memory == 0) return result_at(launch, rank, where.offset);
  const uint64_t ordinal = where.memory - 1, end = launch.inputs.end;
  const bool listed = ordinal < end && ordinal + kKnown >= end;
  void *const *const blocks = listed ? launch.inputs.known[ordinal % kKnown] : nullptr;
  return blocks == nullptr ? nullptr : static_cast<char *>(blocks[rank]) + where.offset;
}

// The first barrier of a collective: after it all inputs are ready, and block_at returns where they lie. Returns the
// same for all threads of the block.
PHX_DEVICE bool inputs_ready(const Launch &launch) {
  if (launch.inputs.apart == 0) return team_barrier(launch);
  const int n = launch.team.group_size;
  if (thread_of_block() == 0) store_as(shown_at(launch, launch.team.group_rank), launch.inputs.own);
  if (!team_barrier(launch)) return false;
  char **const found = found_inputs(launch);
  for (int rank = static_cast<int>(thread_of_block()); rank < n; rank += static_cast<int>(threads_of_block()))
    found[rank] = find_input(launch, rank);
  sync_block();
  bool all = true;
  for (int rank = 0; rank < n; ++rank) {
    if (found[rank] != nullptr) continue;
    all = false;
    if (thread_of_block() == 0) phx_word_put(launch.failed, static_cast<uint32_t>(report(Report::kFreed, n, rank)));
  }
  if (!all) team_barrier(launch);  // the second barrier, in which the others wait for this rank
  return all;
}

PHX_DEVICE char *spread_at(const Launch &launch, int rank, size_t bytes) {
  return static_cast<char *>(launch.spread.team.buffers[rank]) + launch.spread.offset + bytes;
}

// The Part that rank `of` publishes for rank `to` before the first barrier, in the pad of `of`.
PHX_DEVICE char *part_at(const Launch &launch, int of, int to) {
  char *const parts = reinterpret_cast<char *>(launch.team.pads[of]) + launch.parts;
  return parts + (static_cast<size_t>(block_of_grid()) * launch.team.group_size + to) * sizeof(Part);
}

// Publishes where this rank has its result, before the first barrier.
PHX_DEVICE void show_place(const Launch &launch) {
  if (thread_of_block() != 0) return;
  store_as(part_at(launch, launch.team.group_rank, launch.team.group_rank), Part{launch.spread.place, 0});
}
// After that barrier: whether all ranks have published the same place. Returns the same on all ranks.
PHX_DEVICE bool in_one_place(const Launch &launch) {
  bool same = true;
  for (int rank = 0; rank < launch.team.group_size; ++rank) {
    const auto shown = load_as<Part>(part_at(launch, rank, rank));
    same = same && shown.start == launch.spread.place;
  }
  return same;
}

PHX_DEVICE char *out_at(const Launch &launch, size_t bytes) { return static_cast<char *>(launch.out) + bytes; }

// Whether this rank has an output.
PHX_DEVICE bool receives(const Launch &launch) { return launch.root < 0 || launch.root == launch.team.group_rank; }

// Calls `function` for all ranks one after the other, beginning with this one.
template <class Function>
PHX_DEVICE void for_each_rank(const Launch &launch, const Function &function) {
  const int n = launch.team.group_size;
  for (int i = 0; i < n; ++i) function((launch.team.group_rank + i) % n);
}

// The result for the block of one rank is that for all, because an allocation has the same alignment on every rank.
PHX_DEVICE bool is_aligned(const void *at) { return (reinterpret_cast<uintptr_t>(at) & (sizeof(Pack) - 1)) == 0; }

PHX_DEVICE bool inputs_are_aligned(const Launch &launch, size_t bytes) {
  bool aligned = is_aligned(block_at(launch, 0, bytes));
  if (launch.inputs.apart != 0)
    for (int rank = 1; rank < launch.team.group_size; ++rank) aligned &= is_aligned(block_at(launch, rank, bytes));
  return aligned;
}

// The counterparts of phx_symm_put_signal, phx_symm_wait_signal and phx_symm_barrier, by one block on a user's channel.
PHX_DEVICE void barrier(const Launch &launch) { team_barrier(launch); }

PHX_DEVICE void put_signal(const Launch &launch) {
  if (thread_of_block() != 0) return;
  const uint32_t last = phx_team_last(&launch.team, launch.channel, launch.root);
  phx_team_put(&launch.team, launch.channel, launch.root, last + 1);
}

PHX_DEVICE void wait_signal(const Launch &launch) {
  if (thread_of_block() != 0) return;
  uint32_t *const taken = launch.taken + static_cast<size_t>(launch.channel) * launch.team.group_size + launch.root;
  const int32_t status = phx_team_wait(&launch.team, launch.channel, launch.root, *taken + 1, launch.timeout_ns);
  if (status == 0)
    *taken += 1;
  else
    phx_word_put(launch.failed, static_cast<uint32_t>(status));
}

}  // namespace
}  // namespace phx::cuda
