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

// ---- all_reduce of small inputs by the LL protocol (launch.h)

PHX_DEVICE char *line_at(const Launch &launch, uint32_t epoch, int of, int from) {
  const size_t number = line_number(epoch, block_of_grid(), launch.team.group_size, from, thread_of_block());
  return reinterpret_cast<char *>(launch.team.pads[of]) + launch.lines + number * sizeof(Line);
}

PHX_DEVICE bool is_of(const Line &line, uint32_t epoch) {
  return static_cast<uint32_t>(line.half[0] >> 32) == epoch && static_cast<uint32_t>(line.half[1] >> 32) == epoch;
}

// A Line that was never written has 0, so 0 is not an epoch. 1 is left out with it, so that odd and even epochs keep
// alternating, and with them the two Lines of a thread.
PHX_DEVICE uint32_t epoch_after(uint32_t epoch) { return epoch == UINT32_MAX ? 2 : epoch + 1; }

// Whether all threads of a block send in this launch, even those without data. So no Line becomes so old that its epoch
// comes again, 2^32 launches later, when it would count as sent.
PHX_DEVICE bool renews_lines(uint32_t epoch) { return epoch % 65536 < 2; }

// Waits, like phx_team_wait, for the Line that a rank sends to this thread.
PHX_DEVICE int32_t take_line(const Launch &launch, uint32_t epoch, int from, uint64_t *data) {
  const char *const at = line_at(launch, epoch, launch.team.group_rank, from);
  Line line = get_line(at);
  uint64_t begun = 0;
  for (uint32_t looks = 1; !is_of(line, epoch); ++looks) {
    if (looks % 64 == 0) {
      const uint64_t now = phx_private_clock_ns();
      const bool failed = phx_word_get(reinterpret_cast<const uint32_t *>(launch.team.failed) + from) != 0;
      if (failed && !is_of(get_line(at), epoch)) return PHX_ERR_REVOKED;  // the rank may have sent it before it left
      if (begun == 0) begun = now;
      if (now - begun > launch.timeout_ns) return 1 + from;
    }
    phx_private_pause(looks);
    line = get_line(at);
  }
  *data = (line.half[0] & 0xffffffffu) | line.half[1] << 32;
  return 0;
}

// all_reduce of one Line for each thread, which is sent to all ranks, without a barrier. A Line overwrites that of two
// launches before, which the others have read: this rank has completed the launch in between, for which it needed the
// Lines of the others, and they sent those after they had completed the launch before.
template <class E, class Op>
PHX_DEVICE void reduce_lines(const Launch &launch) {
  using Lanes = Several<E, uint64_t>;
  using Raw = typename Lanes::Raw;
  const kernels::Combine<typename Lanes::Acc, Op> op(launch.divisor, launch.scale);
  const int n = launch.team.group_size, self = launch.team.group_rank;
  const uint32_t epoch = epoch_after(launch.epochs[block_of_grid()]);
  const size_t bytes = launch.count * sizeof(Raw), at = thread_of_grid() * sizeof(uint64_t);
  const size_t left = at < bytes ? bytes - at : 0, size = left < sizeof(uint64_t) ? left : sizeof(uint64_t);
  uint64_t mine = 0;
  if (size != 0) std::memcpy(&mine, static_cast<const char *>(launch.in) + at, size);
  if (size != 0 || renews_lines(epoch)) {
    const uint64_t flag = static_cast<uint64_t>(epoch) << 32;
    const Line line{{(mine & 0xffffffffu) | flag, mine >> 32 | flag}};
    for (int i = 1; i < n; ++i) put_line(line_at(launch, epoch, (self + i) % n, self), line);
  }
  if (size != 0) {
    uint64_t data = mine;
    int32_t status = self == 0 ? 0 : take_line(launch, epoch, 0, &data);
    Lanes sum;
    sum.begin(data, op);
    for (int rank = 1; rank < n && status == 0; ++rank) {
      data = mine;
      if (rank != self) status = take_line(launch, epoch, rank, &data);
      sum.add(data, op);
    }
    const uint64_t result = sum.end(op);
    if (status == 0)
      std::memcpy(static_cast<char *>(launch.out) + at, &result, size);
    else
      phx_word_put(launch.failed, static_cast<uint32_t>(status));
  }
  sync_block();  // all threads have read the epoch
  if (thread_of_block() == 0) launch.epochs[block_of_grid()] = epoch;
}

}  // namespace
}  // namespace phx::cuda
