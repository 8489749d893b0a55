// The collectives that only move elements: what one launch does on one rank.
#pragma once

#include "gpu/meeting.h"

namespace phx::cuda {

namespace {

PHX_DEVICE void copy_between(char *to, const char *from, size_t bytes) {
  const size_t whole = is_aligned(to) && is_aligned(from) ? bytes / sizeof(Pack) * sizeof(Pack) : 0;
  for (size_t at = thread_of_grid() * sizeof(Pack); at < whole; at += threads_of_grid() * sizeof(Pack))
    store_pack(to + at, load_pack(from + at));
  for (size_t at = whole + thread_of_grid(); at < bytes; at += threads_of_grid()) to[at] = from[at];
}

// gather is the same kernel with a root.
PHX_DEVICE void all_gather(const Launch &launch) {
  if (!inputs_ready(launch)) return;
  const size_t bytes = launch.count * launch.item;
  if (receives(launch))
    for_each_rank(launch,
                  [&](int from) { copy_between(out_at(launch, from * bytes), block_at(launch, from, 0), bytes); });
  team_barrier(launch);
}

PHX_DEVICE void all_to_all(const Launch &launch) {
  if (!inputs_ready(launch)) return;
  const size_t bytes = launch.count * launch.item, mine = launch.team.group_rank * bytes;
  for_each_rank(launch,
                [&](int from) { copy_between(out_at(launch, from * bytes), block_at(launch, from, mine), bytes); });
  team_barrier(launch);
}

PHX_DEVICE void scatter(const Launch &launch) {
  if (!inputs_ready(launch)) return;
  const size_t bytes = launch.count * launch.item;
  copy_between(out_at(launch, 0), block_at(launch, launch.root, launch.team.group_rank * bytes), bytes);
  team_barrier(launch);
}

// broadcast out of place.
PHX_DEVICE void fetch(const Launch &launch) {
  if (!inputs_ready(launch)) return;
  if (launch.root != launch.team.group_rank)
    copy_between(out_at(launch, 0), block_at(launch, launch.root, 0), launch.count * launch.item);
  team_barrier(launch);
}

PHX_DEVICE uint64_t sum_before(const uint64_t *counts, int rank) {
  uint64_t sum = 0;
  for (int i = 0; i < rank; ++i) sum += counts[i];
  return sum;
}

PHX_DEVICE void all_gather_v(const Launch &launch, const Lists &lists) {
  if (!inputs_ready(launch)) return;
  for_each_rank(launch, [&](int from) {
    copy_between(out_at(launch, sum_before(lists.out, from) * launch.item), block_at(launch, from, 0),
                 lists.out[from] * launch.item);
  });
  team_barrier(launch);
}

// Each rank knows only its own lists, so before the first barrier it publishes where its part for each rank lies.
PHX_DEVICE void all_to_all_v(const Launch &launch, const Lists &lists) {
  const int n = launch.team.group_size, self = launch.team.group_rank;
  for (int to = static_cast<int>(thread_of_block()); to < n; to += static_cast<int>(threads_of_block()))
    store_as(part_at(launch, self, to), Part{sum_before(lists.in, to), lists.in[to]});
  if (!team_barrier(launch)) return;
  for_each_rank(launch, [&](int from) {
    const auto part = load_as<Part>(part_at(launch, from, self));
    if (part.count == lists.out[from])
      copy_between(out_at(launch, sum_before(lists.out, from) * launch.item),
                   block_at(launch, from, part.start * launch.item), part.count * launch.item);
    else if (thread_of_block() == 0)
      phx_word_put(launch.failed, static_cast<uint32_t>(report(Report::kDisagrees, n, from)));
  });
  team_barrier(launch);
}

// broadcast in place. The root, which has nothing to fetch, writes the last of n parts of every block itself.
PHX_DEVICE void broadcast(const Launch &launch) {
  if (!team_barrier(launch)) return;
  const int n = launch.team.group_size, self = launch.team.group_rank;
  const size_t bytes = launch.count * launch.item, part = (bytes + n - 1) / n;
  const size_t even = (part + sizeof(Pack) - 1) / sizeof(Pack) * sizeof(Pack) * (n - 1);
  const size_t fetched = even < bytes ? even : bytes;
  if (self != launch.root)
    copy_between(block_at(launch, self, 0), block_at(launch, launch.root, 0), fetched);
  else
    for (int i = 1; i < n; ++i)
      copy_between(block_at(launch, (self + i) % n, fetched), block_at(launch, self, fetched), bytes - fetched);
  team_barrier(launch);
}

// ---- all_to_all_v of ordinary memory
//
// No rank knows how much the others send. Each block of threads moves a stretch of every part by itself. Its share of
// the workspace has two slots per rank: while the others fetch from one, the other is filled. All ranks know the number
// of rounds after the first barrier.

// Like copy_between, by one block.
PHX_DEVICE void copy_by_block(char *to, const char *from, size_t bytes) {
  const size_t whole = is_aligned(to) && is_aligned(from) ? bytes / sizeof(Pack) * sizeof(Pack) : 0;
  for (size_t at = thread_of_block() * sizeof(Pack); at < whole; at += threads_of_block() * sizeof(Pack))
    store_pack(to + at, load_pack(from + at));
  for (size_t at = whole + thread_of_block(); at < bytes; at += threads_of_block()) to[at] = from[at];
}

PHX_DEVICE size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

// The stretch of a part that this block moves, or the chunk of it that moves in one round.
struct Stretch {
  size_t begin, size;
};
PHX_DEVICE size_t share_of(size_t bytes) { return (bytes / blocks_of_grid() / sizeof(Pack) + 1) * sizeof(Pack); }
PHX_DEVICE Stretch stretch_of(size_t bytes) {
  const size_t share = share_of(bytes);
  const size_t begin = smaller(share * block_of_grid(), bytes);
  return {begin, smaller(share, bytes - begin)};
}
PHX_DEVICE Stretch chunk_of(const Stretch &stretch, size_t round, size_t slot) {
  const size_t begin = smaller(round * slot, stretch.size);
  return {stretch.begin + begin, smaller(slot, stretch.size - begin)};
}

PHX_DEVICE char *slot_at(const Launch &launch, size_t slot, size_t round, int of, int to) {
  const size_t n = static_cast<size_t>(launch.team.group_size);
  return block_at(launch, of, ((2 * block_of_grid() + round % 2) * n + to) * slot);
}

PHX_DEVICE void fill_slots(const Launch &launch, const Lists &lists, size_t slot, size_t round) {
  const int n = launch.team.group_size, self = launch.team.group_rank;
  for (int to = 0; to < n; ++to) {
    if (to == self) continue;
    const Stretch chunk = chunk_of(stretch_of(lists.in[to] * launch.item), round, slot);
    const char *const from = static_cast<const char *>(launch.in) + sum_before(lists.in, to) * launch.item;
    copy_by_block(slot_at(launch, slot, round, self, to), from + chunk.begin, chunk.size);
  }
}

PHX_DEVICE void all_to_all_v_by_slots(const Launch &launch, const Lists &lists) {
  const int n = launch.team.group_size, self = launch.team.group_rank;
  const size_t slot = launch.team.bytes / (size_t{2} * blocks_of_grid() * n) / sizeof(Pack) * sizeof(Pack);
  uint64_t most = 0;
  for (int to = 0; to < n; ++to)
    if (to != self && lists.in[to] > most) most = lists.in[to];
  // Each rank publishes before the first barrier how much it sends to each other one, and, as `start`, the most that it
  // sends to any.
  for (int to = static_cast<int>(thread_of_block()); to < n; to += static_cast<int>(threads_of_block()))
    store_as(part_at(launch, self, to), Part{most, lists.in[to]});
  fill_slots(launch, lists, slot, 0);
  if (!team_barrier(launch)) return;
  bool differs = false;
  for (int from = 0; from < n; ++from) {
    const auto part = load_as<Part>(part_at(launch, from, self));
    most = part.start > most ? part.start : most;
    if (part.count == lists.out[from]) continue;
    differs = true;
    if (thread_of_block() == 0) phx_word_put(launch.failed, static_cast<uint32_t>(report(Report::kDisagrees, n, from)));
  }
  const size_t rounds = (share_of(most * launch.item) + slot - 1) / slot;
  for (size_t round = 0; round < rounds; ++round) {
    for_each_rank(launch, [&](int from) {
      const Stretch stretch = stretch_of(lists.out[from] * launch.item);
      char *const to = out_at(launch, sum_before(lists.out, from) * launch.item);
      if (differs || (from == self && round != 0)) return;
      const Stretch chunk = from == self ? stretch : chunk_of(stretch, round, slot);
      const char *const mine =
          static_cast<const char *>(launch.in) + sum_before(lists.in, self) * launch.item + chunk.begin;
      copy_by_block(to + chunk.begin, from == self ? mine : slot_at(launch, slot, round, from, self), chunk.size);
    });
    if (round + 1 < rounds) fill_slots(launch, lists, slot, round + 1);
    if (!team_barrier(launch)) return;
  }
}

}  // namespace
}  // namespace phx::cuda
