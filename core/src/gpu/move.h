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

}  // namespace
}  // namespace phx::cuda
