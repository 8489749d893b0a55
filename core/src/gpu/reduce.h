// all_reduce, reduce and reduce_scatter: what one launch does on one rank.
//
// The results have the same bits as on the host: the same elements and ops (kernels/portable.h) in the order of ranks,
// with 16- and 8-bit floats in float32 and rounded once. Compiled without contraction: nvcc --fmad=false.
#pragma once

#include "gpu/meeting.h"
#include "kernels/portable.h"

namespace phx::cuda {

namespace {

// The accumulators of the elements that `Bits` holds.
template <class E, class Bits>
struct Several {
  using Element = kernels::Element<E>;
  using Raw = typename Element::Raw;
  using Acc = typename Element::Acc;
  static constexpr int kCount = sizeof(Bits) / sizeof(Raw);
  Acc acc[kCount];

  template <class Op>
  PHX_DEVICE void begin(const Bits &bits, const Op &op) {
    Raw raw[kCount];
    std::memcpy(raw, &bits, sizeof raw);
    for (int i = 0; i < kCount; ++i) acc[i] = op.prepare(Element::widen(raw[i]));
  }
  template <class Op>
  PHX_DEVICE void add(const Bits &bits, const Op &op) {
    Raw raw[kCount];
    std::memcpy(raw, &bits, sizeof raw);
    for (int i = 0; i < kCount; ++i) acc[i] = op.combine(acc[i], op.prepare(Element::widen(raw[i])));
  }
  template <class Op>
  PHX_DEVICE Bits end(const Op &op) const {
    Raw raw[kCount];
    for (int i = 0; i < kCount; ++i) raw[i] = Element::narrow(op.finish(acc[i]));
    Bits bits;
    std::memcpy(&bits, raw, sizeof bits);
    return bits;
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

// Reduces the elements from `begin` to `end` of the input over all ranks. `take` gets the offset of each pack, in bytes
// into the input, the pack, and how to store it: as a whole, or as one element if packs would not be aligned.
template <class E, class Op, class Take>
PHX_DEVICE void reduce_between(const Launch &launch, size_t begin, size_t end, bool packs, Take &&take) {
  using Lanes = Several<E, Pack>;
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
  // One element at a time: the rest, or all elements if packs would not be aligned.
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

// all_reduce in one shot: every rank reduces everything; reduce: the root does; reduce_scatter: every rank its part.
template <class E, class Op>
PHX_DEVICE void reduce_into_out(const Launch &launch) {
  if (!inputs_ready(launch)) return;
  using Raw = typename kernels::Element<E>::Raw;
  const size_t first = launch.begin * sizeof(Raw);
  char *const out = static_cast<char *>(launch.out);
  const bool packs = is_aligned(out) && inputs_are_aligned(launch, first);
  if (receives(launch))
    reduce_between<E, Op>(launch, launch.begin, launch.begin + launch.count, packs,
                          [&](size_t at, const Pack &pack, auto put) { put(out + (at - first), pack); });
  team_barrier(launch);
}

// all_reduce in two shots: each rank reduces its part, which no other rank touches, and writes the result to the blocks
// of all ranks, over the inputs if they lie there.
template <class E, class Op>
PHX_DEVICE void reduce_in_place(const Launch &launch) {
  if (!inputs_ready(launch)) return;
  constexpr size_t kLine = 128 / sizeof(typename kernels::Element<E>::Raw);  // no line has two writers
  const size_t n = launch.team.group_size, rank = launch.team.group_rank;
  const size_t part = ((launch.count + n - 1) / n + kLine - 1) / kLine * kLine;
  const size_t begin = part * rank < launch.count ? part * rank : launch.count;
  const size_t end = begin + part < launch.count ? begin + part : launch.count;
  reduce_between<E, Op>(launch, begin, end, is_aligned(result_at(launch, 0, 0)) && inputs_are_aligned(launch, 0),
                        [&](size_t at, const Pack &pack, auto put) {
                          for (size_t i = 1; i <= n; ++i)
                            put(result_at(launch, static_cast<int>((rank + i) % n), at), pack);
                        });
  team_barrier(launch);
}

}  // namespace
}  // namespace phx::cuda
