// The collectives on symmetric memory of GPUs: what one launch does on one rank.
//
// Each block of threads meets the blocks of the same number on the other ranks, twice. After the first time every
// rank's kernel has begun, and so what that rank's stream had to do before it is done: all inputs are there. After the
// second time nobody reads or writes any more, block by block, and the launch is over when all of its blocks have met.
//
// The bits are those of the host: the same elements and ops (kernels/portable.h), in the order of ranks, 16- and 8-bit
// floats in float32 and rounded once. Without contraction: nvcc --fmad=false.
#pragma once

#include "cuda/block.h"
#include "cuda/launch.h"
#include "kernels/portable.h"

namespace phx::cuda {

namespace {

PHX_DEVICE char *block_at(const Launch &launch, int rank, size_t bytes) {
  return static_cast<char *>(launch.team.buffers[rank]) + launch.offset + bytes;
}

// All threads of the block get the same answer.
PHX_DEVICE bool all_meet(const Launch &launch) {
  const int32_t status = meet(&launch.team, launch.channel, launch.timeout_ns);
  if (status != 0 && thread_of_block() == 0) phx_word_put(launch.failed, static_cast<uint32_t>(status));
  return status == 0;
}

// Of one rank's block it says the same as of all: an allocation is aligned alike everywhere, and so is an offset into
// it.
PHX_DEVICE bool is_aligned(const void *at) { return (reinterpret_cast<uintptr_t>(at) & (sizeof(Pack) - 1)) == 0; }

// The elements of a pack, as they are added up.
template <class E>
struct Several {
  using Element = kernels::Element<E>;
  using Raw = typename Element::Raw;
  using Acc = typename Element::Acc;
  static constexpr int kCount = sizeof(Pack) / sizeof(Raw);
  Acc acc[kCount];

  template <class Op>
  PHX_DEVICE void begin(const Pack &pack, const Op &op) {
    Raw raw[kCount];
    std::memcpy(raw, &pack, sizeof raw);
    for (int i = 0; i < kCount; ++i) acc[i] = op.prepare(Element::widen(raw[i]));
  }
  template <class Op>
  PHX_DEVICE void add(const Pack &pack, const Op &op) {
    Raw raw[kCount];
    std::memcpy(raw, &pack, sizeof raw);
    for (int i = 0; i < kCount; ++i) acc[i] = op.combine(acc[i], op.prepare(Element::widen(raw[i])));
  }
  template <class Op>
  PHX_DEVICE Pack end(const Op &op) const {
    Raw raw[kCount];
    for (int i = 0; i < kCount; ++i) raw[i] = Element::narrow(op.finish(acc[i]));
    Pack pack;
    std::memcpy(&pack, raw, sizeof pack);
    return pack;
  }
};

// Ways to store a result: a whole pack, or its first bytes, which may lie anywhere.
struct Whole {
  PHX_DEVICE void operator()(char *to, const Pack &pack) const { store_pack(to, pack); }
};
template <size_t kBytes>
struct First {
  PHX_DEVICE void operator()(char *to, const Pack &pack) const { std::memcpy(to, &pack, kBytes); }
};

// Elements from `begin` to `end` of the input, summed over all ranks. `take` gets the place of each pack, in bytes into
// the input, the pack, and how to store it: a whole one, or one element, where packs would not be aligned.
template <class E, class Op, class Take>
PHX_DEVICE void reduce_between(const Launch &launch, size_t begin, size_t end, bool packs, Take &&take) {
  using Lanes = Several<E>;
  using Raw = typename Lanes::Raw;
  const kernels::Combine<typename Lanes::Acc, Op> op(launch.divisor, launch.scale);
  const int n = launch.team.group_size;
  const size_t bytes = (end - begin) * sizeof(Raw), first = begin * sizeof(Raw);
  const size_t whole = packs ? bytes / sizeof(Pack) * sizeof(Pack) : 0;
  for (size_t at = thread_of_grid() * sizeof(Pack); at < whole; at += threads_of_grid() * sizeof(Pack)) {
    Lanes sum;
    sum.begin(load_pack(block_at(launch, 0, first + at)), op);
    for (int rank = 1; rank < n; ++rank) sum.add(load_pack(block_at(launch, rank, first + at)), op);
    take(first + at, sum.end(op), Whole());
  }
  // One element at a time: what is left, or all, where packs would not lie where loads can take them.
  for (size_t at = whole + thread_of_grid() * sizeof(Raw); at < bytes; at += threads_of_grid() * sizeof(Raw)) {
    Pack pack{};
    std::memcpy(&pack, block_at(launch, 0, first + at), sizeof(Raw));
    Lanes sum;
    sum.begin(pack, op);
    for (int rank = 1; rank < n; ++rank) {
      std::memcpy(&pack, block_at(launch, rank, first + at), sizeof(Raw));
      sum.add(pack, op);
    }
    take(first + at, sum.end(op), First<sizeof(Raw)>());
  }
}

// all_reduce in one shot: every rank sums everything. reduce_scatter: every rank sums its part.
template <class E, class Op>
PHX_DEVICE void reduce_into_out(const Launch &launch) {
  if (!all_meet(launch)) return;
  using Raw = typename Several<E>::Raw;
  const size_t first = launch.begin * sizeof(Raw);
  char *const out = static_cast<char *>(launch.out);
  const bool packs = is_aligned(out) && is_aligned(block_at(launch, 0, first));
  reduce_between<E, Op>(launch, launch.begin, launch.begin + launch.count, packs,
                        [&](size_t at, const Pack &pack, auto put) { put(out + (at - first), pack); });
  all_meet(launch);
}

// all_reduce in two: each rank sums its part, which nobody else touches, and writes it over all inputs.
template <class E, class Op>
PHX_DEVICE void reduce_in_place(const Launch &launch) {
  if (!all_meet(launch)) return;
  constexpr size_t kLine = 128 / sizeof(typename Several<E>::Raw);  // no line has two writers
  const size_t n = launch.team.group_size, rank = launch.team.group_rank;
  const size_t part = ((launch.count + n - 1) / n + kLine - 1) / kLine * kLine;
  const size_t begin = part * rank < launch.count ? part * rank : launch.count;
  const size_t end = begin + part < launch.count ? begin + part : launch.count;
  reduce_between<E, Op>(launch, begin, end, is_aligned(block_at(launch, 0, 0)),
                        [&](size_t at, const Pack &pack, auto put) {
                          for (size_t i = 1; i <= n; ++i)
                            put(block_at(launch, static_cast<int>((rank + i) % n), at), pack);
                        });
  all_meet(launch);
}

PHX_DEVICE void copy_between(char *to, const char *from, size_t bytes) {
  const size_t whole = is_aligned(to) && is_aligned(from) ? bytes / sizeof(Pack) * sizeof(Pack) : 0;
  for (size_t at = thread_of_grid() * sizeof(Pack); at < whole; at += threads_of_grid() * sizeof(Pack))
    store_pack(to + at, load_pack(from + at));
  for (size_t at = whole + thread_of_grid(); at < bytes; at += threads_of_grid()) to[at] = from[at];
}

// `item`: bytes of an element. All blocks, one after the other, beginning with the own one.
PHX_DEVICE void all_gather(const Launch &launch, size_t item) {
  if (!all_meet(launch)) return;
  const size_t bytes = launch.count * item;
  for (int i = 0; i < launch.team.group_size; ++i) {
    const int from = (launch.team.group_rank + i) % launch.team.group_size;
    copy_between(static_cast<char *>(launch.out) + from * bytes, block_at(launch, from, 0), bytes);
  }
  all_meet(launch);
}

PHX_DEVICE void all_to_all(const Launch &launch, size_t item) {
  if (!all_meet(launch)) return;
  const size_t bytes = launch.count * item;
  for (int i = 0; i < launch.team.group_size; ++i) {
    const int from = (launch.team.group_rank + i) % launch.team.group_size;
    copy_between(static_cast<char *>(launch.out) + from * bytes, block_at(launch, from, launch.team.group_rank * bytes),
                 bytes);
  }
  all_meet(launch);
}

// What the host does with phx_symm_put_signal, wait_signal and barrier, by one block on a channel of the user's.
PHX_DEVICE void barrier(const Launch &launch) { all_meet(launch); }

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

// In place. The root, which has nothing to fetch, writes the last of n parts of every block itself.
PHX_DEVICE void broadcast(const Launch &launch, size_t item) {
  if (!all_meet(launch)) return;
  const int n = launch.team.group_size, self = launch.team.group_rank;
  const size_t bytes = launch.count * item, part = (bytes + n - 1) / n;
  const size_t even = (part + sizeof(Pack) - 1) / sizeof(Pack) * sizeof(Pack) * (n - 1);
  const size_t fetched = even < bytes ? even : bytes;
  if (self != launch.root)
    copy_between(block_at(launch, self, 0), block_at(launch, launch.root, 0), fetched);
  else
    for (int i = 1; i < n; ++i)
      copy_between(block_at(launch, (self + i) % n, fetched), block_at(launch, self, fetched), bytes - fetched);
  all_meet(launch);
}

}  // namespace
}  // namespace phx::cuda
