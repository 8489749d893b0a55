// Ranks that are members of a group with small chunks, so that small inputs reach the deep paths.
#pragma once

#include "base/sanitizers.h"
#include "collective_case.h"
#include "ranks.h"

namespace members {

using collective::Member;

#ifdef PHX_SANITIZED
constexpr size_t kThinner = 8;  // how much less is done: these runs are for races and bounds
#else
constexpr size_t kThinner = 1;
#endif

struct Setup {
  uint64_t staging_bytes;
  phx_tuning tuning;
  size_t chunk() const { return std::min<size_t>(staging_bytes, tuning.chunk_bytes); }
};
constexpr phx_tuning tuning_of(uint64_t one_shot, uint64_t chunk, uint64_t streaming, uint64_t push) {
  return {sizeof(phx_tuning), 0, one_shot, chunk, streaming, push};
}
constexpr Setup kTiny = {1024, tuning_of(256, 4096, uint64_t{1} << 40, 64)};
constexpr Setup kStreaming = {65536, tuning_of(2048, 65536, 1, 4096)};  // stores around the cache, also of sums
constexpr Setup kPlain = {512, tuning_of(uint64_t{1} << 40, 4096, uint64_t{1} << 40, 1 << 14)};  // no exchanges
constexpr Setup kUsual = {0, tuning_of(0, 0, 0, 0)};

constexpr size_t kBlockBytes = size_t{4} << 20;

using Body = std::function<void(const Member &)>;

// This rank's membership in a new group of all these ranks, with a symmetric block.
inline Member join(phx_world *world, const char *name, const std::vector<int> &ranks, size_t block_bytes,
                   const phx_tuning &tuning) {
  Member member;
  member.ranks = ranks;
  const std::vector<int32_t> list(ranks.begin(), ranks.end());
  CHECK_OK(phx_group_create(world, name, list.data(), static_cast<int32_t>(list.size()), 0, &member.group));
  phx_group_info info{};
  info.struct_size = sizeof info;
  CHECK_OK(phx_group_get_info(member.group, &info));
  member.self = info.group_rank;
  CHECK_OK(phx_group_set_tuning(member.group, &tuning, 0));
  void *block = nullptr;
  CHECK_OK(phx_mem_alloc(world, nullptr, block_bytes, &block));
  CHECK_OK(phx_symm_rendezvous(member.group, block, 0, &member.symm));
  member.block = static_cast<char *>(block);
  member.block_bytes = block_bytes;
  return member;
}

inline void leave(phx_world *world, const Member &member) {
  phx_symm_release(member.symm);
  CHECK_OK(phx_mem_free(world, member.block));
  phx_group_release(member.group);
}

inline std::vector<int> all_of(phx_world *world) {
  std::vector<int> all(static_cast<size_t>(phx_world_size(world)));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

inline ranks::Options options_of(const Setup &setup) {
  ranks::Options options;
  options.staging_bytes = setup.staging_bytes;
  options.timeout_ms = 60000;
  return options;
}

inline void with_member(phx_world *world, const Setup &setup, const Body &body) {
  const Member member = join(world, "all", all_of(world), kBlockBytes, setup.tuning);
  body(member);
  CHECK_OK(phx_barrier(member.group, nullptr, nullptr));
  leave(world, member);
}
inline void with_threads(int n, const Setup &setup, const Body &body) {
  ranks::as_threads(
      n, [&](int, phx_world *world) { with_member(world, setup, body); }, options_of(setup));
}
inline void with_processes(int n, const Setup &setup, const Body &body) {
  ranks::all_zero(ranks::as_processes(
      n, [&](int, phx_world *world) { with_member(world, setup, body); }, options_of(setup)));
}

inline uint64_t zero_copies(phx_group *group) {
  phx_group_stats stats = PHX_GROUP_STATS_INIT;
  CHECK_OK(phx_group_get_stats(group, &stats));
  return stats.zero_copies;
}
inline size_t eager_bytes(phx_group *group) {
  phx_group_stats stats = PHX_GROUP_STATS_INIT;
  CHECK_OK(phx_group_get_stats(group, &stats));
  return stats.eager_bytes;
}

// Numbers that look random, the same for the same seed.
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(reference::mix(seed)) {}
  uint64_t next() { return reference::mix(state_++) >> 11; }
  size_t below(size_t end) { return static_cast<size_t>(next() % end); }
  bool one_in(size_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

// Some call that is possible, of at most so many bytes for each rank.
inline collective::Case draw_case(Draw &draw, size_t n, size_t most_bytes, bool coalesced_only) {
  for (;;) {
    collective::Case c;
    c.what = static_cast<collective::What>(draw.below(collective::kWhats));
    c.where = static_cast<collective::Where>(draw.below(coalesced_only ? 2 : collective::kWheres));
    if (coalesced_only && collective::has_lists(c.what)) continue;
    c.in_place = draw.one_in(2) || c.what == collective::What::kBroadcast;
    c.dtype = static_cast<int32_t>(PHX_DTYPE_F16 + draw.below(reference::kLastDtype));
    c.op = static_cast<int32_t>(PHX_OP_SUM + draw.below(reference::kLastOp));
    c.count = draw.below(draw.below(most_bytes + 1) + 1) / phx_dtype_size(c.dtype);
    c.root = static_cast<int>(draw.below(n));
    c.seed = draw.next();
    if (possible(c)) return c;
  }
}

}  // namespace members
