// The collectives that NVLink switches do: what one launch does on one rank. Empty for GPUs before sm_90.
//
// A switch adds in an order of its own, so sums of floats have the same bits on all ranks only if one rank loads each
// sum and stores it to all. Elements that do not fill 16 bytes are reduced without the switch.
#pragma once

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

#include "gpu/move.h"
#include "gpu/reduce.h"

namespace phx::cuda {

namespace {

static_assert(sizeof(Pack) == sizeof(phx_pack));

// The pairs of element and op that switches support. reduce() reduces the packs at an offset into all blocks.
template <class E, class Op>
struct Switch;
#define PHX_SWITCH(E, Op, name)                                          \
  template <>                                                            \
  struct Switch<E, Op> {                                                 \
    PHX_DEVICE static Pack reduce(const phx_team *team, size_t offset) { \
      const phx_pack seen = phx_multicast_##name(team, offset);          \
      return {{seen.word[0], seen.word[1], seen.word[2], seen.word[3]}}; \
    }                                                                    \
  };
#define PHX_SWITCH_RANGE(E, elements)             \
  PHX_SWITCH(E, kernels::Minimum, min_##elements) \
  PHX_SWITCH(E, kernels::Maximum, max_##elements)

PHX_SWITCH(float, kernels::Sum, sum_f32x4)
PHX_SWITCH(double, kernels::Sum, sum_f64x2)
PHX_SWITCH(kernels::F16, kernels::Sum, sum_f16x8)
PHX_SWITCH(kernels::BF16, kernels::Sum, sum_bf16x8)
PHX_SWITCH(uint32_t, kernels::Sum, sum_u32x4)
PHX_SWITCH(uint64_t, kernels::Sum, sum_u64x2)
PHX_SWITCH_RANGE(kernels::F16, f16x8)
PHX_SWITCH_RANGE(kernels::BF16, bf16x8)
PHX_SWITCH_RANGE(uint32_t, u32x4)
PHX_SWITCH_RANGE(int32_t, i32x4)
PHX_SWITCH_RANGE(uint64_t, u64x2)
PHX_SWITCH_RANGE(int64_t, i64x2)
PHX_SWITCH(uint8_t, kernels::BitAnd, and_b64x2)  // serves wider integers as well
PHX_SWITCH(uint8_t, kernels::BitOr, or_b64x2)
PHX_SWITCH(uint8_t, kernels::BitXor, xor_b64x2)
#undef PHX_SWITCH_RANGE
#undef PHX_SWITCH

PHX_DEVICE void put_to_all(const Launch &launch, size_t at, const Pack &pack) {
  phx_multicast_put(&launch.spread.team, launch.spread.offset + at,
                    {{pack.word[0], pack.word[1], pack.word[2], pack.word[3]}});
}

// How many bytes lie between `at` and the first whole pack.
PHX_DEVICE size_t ahead_of_packs(size_t at, size_t bytes) {
  const size_t ahead = (sizeof(Pack) - at % sizeof(Pack)) % sizeof(Pack);
  return ahead < bytes ? ahead : bytes;
}

// Like reduce_between, by the switches. packs: whether `take` can store whole packs. Several loads are in flight at
// once, because each takes long.
template <class E, class Op, class Take>
PHX_DEVICE void switch_between(const Launch &launch, size_t begin, size_t end, bool packs, Take &&take) {
  constexpr size_t kSize = sizeof(typename kernels::Element<E>::Raw);
  constexpr int kAtOnce = 4;
  const size_t first = begin * kSize, last = end * kSize, stride = threads_of_grid() * sizeof(Pack);
  const size_t from = first + ahead_of_packs(launch.offset + first, last - first);
  const size_t until = from + (last - from) / sizeof(Pack) * sizeof(Pack);
  for (size_t at = from + thread_of_grid() * sizeof(Pack); at < until; at += kAtOnce * stride) {
    Pack sums[kAtOnce];
    for (int i = 0; i < kAtOnce; ++i)
      if (at + i * stride < until) sums[i] = Switch<E, Op>::reduce(&launch.team, launch.offset + at + i * stride);
    for (int i = 0; i < kAtOnce; ++i) {
      if (at + i * stride >= until) continue;
      if (packs)
        take(at + i * stride, sums[i], Whole());
      else
        take(at + i * stride, sums[i], First<sizeof(Pack)>());
    }
  }
  reduce_between<E, Op>(launch, begin, from / kSize, false, take);
  reduce_between<E, Op>(launch, until / kSize, end, false, take);
}

// reduce_scatter, reduce, and all_reduce if the order does not matter: every rank loads its own result.
template <class E, class Op>
PHX_DEVICE void multimem_reduce(const Launch &launch) {
  if (!team_barrier(launch)) return;
  phx_multicast_fence();
  const size_t first = launch.begin * sizeof(typename kernels::Element<E>::Raw);
  const bool packs = (reinterpret_cast<uintptr_t>(launch.out) - first - launch.offset) % sizeof(Pack) == 0;
  if (receives(launch))
    switch_between<E, Op>(launch, launch.begin, launch.begin + launch.count, packs,
                          [&](size_t at, const Pack &pack, auto put) { put(out_at(launch, at - first), pack); });
  team_barrier(launch);
}

// Stores a result to all ranks: a pack by multicast, and a single element to one rank after the other.
struct ToAll {
  const Launch &launch;
  PHX_DEVICE void operator()(size_t at, const Pack &pack, Whole) const { put_to_all(launch, at, pack); }
  template <size_t kBytes>
  PHX_DEVICE void operator()(size_t at, const Pack &pack, First<kBytes> put) const {
    for_each_rank(launch, [&](int to) { put(spread_at(launch, to, at), pack); });
  }
};

// all_reduce in two shots, in place or to the place of the results of all ranks: each rank reduces its part, which no
// other rank touches.
template <class E, class Op>
PHX_DEVICE void multimem_reduce_to_all(const Launch &launch) {
  show_place(launch);
  if (!team_barrier(launch)) return;
  if (in_one_place(launch)) {
    phx_multicast_fence();
    constexpr size_t kLine = 128 / sizeof(typename kernels::Element<E>::Raw);  // no line has two writers
    const size_t n = launch.team.group_size, rank = launch.team.group_rank;
    const size_t part = ((launch.count + n - 1) / n + kLine - 1) / kLine * kLine;
    const size_t begin = part * rank < launch.count ? part * rank : launch.count;
    const size_t end = begin + part < launch.count ? begin + part : launch.count;
    switch_between<E, Op>(launch, begin, end, true, ToAll{launch});
    phx_multicast_fence();
  }
  team_barrier(launch);
}

// broadcast in place, by the root alone.
PHX_DEVICE void multimem_broadcast(const Launch &launch) {
  if (!team_barrier(launch)) return;
  if (launch.root == launch.team.group_rank) {
    const size_t bytes = launch.count * launch.item, ahead = ahead_of_packs(launch.offset, bytes);
    const size_t until = ahead + (bytes - ahead) / sizeof(Pack) * sizeof(Pack);
    phx_multicast_fence();
    for (size_t at = ahead + thread_of_grid() * sizeof(Pack); at < until; at += threads_of_grid() * sizeof(Pack))
      put_to_all(launch, at, load_pack(block_at(launch, launch.root, at)));
    for_each_rank(launch, [&](int to) {
      if (to == launch.root) return;
      copy_between(result_at(launch, to, 0), block_at(launch, launch.root, 0), ahead);
      copy_between(result_at(launch, to, until), block_at(launch, launch.root, until), bytes - until);
    });
    phx_multicast_fence();
  }
  team_barrier(launch);
}

// Each rank stores its input to all ranks, if all have their results at the same place. Otherwise each rank fetches the
// inputs. The caller ensures that packs are whole.
PHX_DEVICE void multimem_all_gather(const Launch &launch) {
  show_place(launch);
  if (!inputs_ready(launch)) return;
  const size_t bytes = launch.count * launch.item, mine = launch.team.group_rank * bytes;
  if (launch.spread.place != 0 && in_one_place(launch)) {
    const char *const from = block_at(launch, launch.team.group_rank, 0);
    const bool aligned = is_aligned(from);
    phx_multicast_fence();
    for (size_t at = thread_of_grid() * sizeof(Pack); at < bytes; at += threads_of_grid() * sizeof(Pack)) {
      Pack pack;
      if (aligned)
        pack = load_pack(from + at);
      else
        std::memcpy(&pack, from + at, sizeof pack);
      put_to_all(launch, mine + at, pack);
    }
    phx_multicast_fence();
  } else {
    for_each_rank(launch,
                  [&](int from) { copy_between(out_at(launch, from * bytes), block_at(launch, from, 0), bytes); });
  }
  team_barrier(launch);
}

}  // namespace
}  // namespace phx::cuda

#endif
