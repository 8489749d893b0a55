// phalanx/device.h: kernels on the CPU that use symmetric memory by themselves.
#include "phalanx/device.h"

#include <cstring>

#include "ranks.h"

namespace {

constexpr uint64_t kLong = 60ull * 1000000000;
constexpr uint64_t kShort = 50ull * 1000000;

phx_team team_of(phx_symm *symm) {
  phx_team team{};
  team.struct_size = sizeof team;
  CHECK_OK(phx_symm_get_team(symm, &team));
  return team;
}

struct Symmetric {
  Symmetric(phx_world *world, size_t bytes) : group(ranks::make_group(world)), world(world) {
    CHECK_OK(phx_mem_alloc(world, nullptr, bytes, &block));
    CHECK_OK(phx_symm_rendezvous(group, block, 0, &symm));
    team = team_of(symm);
  }
  ~Symmetric() {
    phx_symm_release(symm);
    CHECK_OK(phx_mem_free(world, block));
    phx_group_release(group);
  }
  phx_group *group;
  phx_world *world;
  void *block = nullptr;
  phx_symm *symm = nullptr;
  phx_team team{};
};

void describe(int rank, phx_world *world) {
  Symmetric s(world, 1000);
  const phx_team &team = s.team;
  CHECK(team.group_rank == rank && team.group_size == 3 && team.bytes == 1000 && team.channels > 0);
  CHECK(team.multicast == nullptr);
  CHECK(phx_team_at(&team, rank, 0) == s.block);
  for (int r = 0; r < 3; ++r) {
    CHECK(phx_team_at(&team, r, 8) == static_cast<char *>(phx_symm_buffer(s.symm, r)) + 8);
    CHECK(phx_team_word(&team, r, 2, 1) == phx_symm_signal_pad(s.symm, r) + team.pad_stride + 2);
    CHECK(phx_team_last(&team, 0, r) == 0 && team.failed[r] == 0);
  }
  phx_team old{};
  old.struct_size = sizeof old - sizeof old.failed;  // of a caller that was compiled with less
  CHECK_OK(phx_symm_get_team(s.symm, &old));
  CHECK(old.bytes == 1000 && old.failed == nullptr);
  CHECK_FAILS(PHX_ERR_INVALID, "symm is NULL", phx_symm_get_team(nullptr, &old));
  CHECK_FAILS(PHX_ERR_INVALID, "NULL", phx_symm_get_team(s.symm, nullptr));
  CHECK_OK(phx_symm_barrier(s.symm, 0, 0));
}

TEST(a_team_says_where_everything_is) { ranks::as_threads(3, describe); }  // M31

// Each round: write, barrier, read what the others wrote, barrier.
void meet(int rank, phx_world *world) {
  Symmetric s(world, 4096);
  auto *mine = static_cast<int64_t *>(phx_team_at(&s.team, rank, 0));
  for (int64_t round = 1; round <= 2000; ++round) {
    for (int i = 0; i < 512; i += 73) mine[i] = round * 10 + rank;
    CHECK(phx_team_barrier(&s.team, 1, kLong) == 0);
    for (int r = 0; r < 3; ++r)
      for (int i = 0; i < 512; i += 73) CHECK(static_cast<int64_t *>(phx_team_at(&s.team, r, 0))[i] == round * 10 + r);
    CHECK(phx_team_barrier(&s.team, 1, kLong) == 0);
  }
  CHECK(phx_team_last(&s.team, 1, rank) == 4000);
  CHECK_OK(phx_symm_barrier(s.symm, 1, 0));  // the core's own barriers have other words
}

TEST(what_was_written_before_a_barrier_is_seen_after_it) { ranks::as_threads(3, meet); }  // M27 M32
TEST(what_was_written_before_a_barrier_is_seen_after_it_by_processes) { ranks::all_zero(ranks::as_processes(3, meet)); }

// On the host they go over the blocks: what a kernel does with them can be tried where there is no switch.
void multicast(int rank, phx_world *world) {
  Symmetric s(world, 64);
  const auto mine = static_cast<char *>(s.block);
  const float floats[4] = {0.5F + static_cast<float>(rank), -1, 0x1p100F, static_cast<float>(rank)};
  const uint16_t halves[8] = {0x3c00, 0x0001, 0x7bff, static_cast<uint16_t>(rank == 1 ? 0x7e00 : 0x3c00),
                              0xbc00, 0x8000, 0x0400, 0x5555};  // 1, the smallest, the largest, a NaN, -1, -0, ...
  const int32_t integers[4] = {rank - 1, 1 << 30, -5 * rank, 7};
  std::memcpy(mine, floats, 16);
  std::memcpy(mine + 16, halves, 16);
  std::memcpy(mine + 32, integers, 16);
  CHECK(phx_team_barrier(&s.team, 0, kLong) == 0);
  const phx_pack sum = phx_multicast_sum_f32x4(&s.team, 0), half = phx_multicast_sum_f16x8(&s.team, 16);
  const phx_pack least = phx_multicast_min_i32x4(&s.team, 32), whole = phx_multicast_sum_u32x4(&s.team, 32);
  const phx_pack both = phx_multicast_or_b64x2(&s.team, 32), brains = phx_multicast_max_bf16x8(&s.team, 16);
  const float sums[4] = {4.5F, -3, 0x3p100F, 3};
  // 3, three of the smallest, infinity, a NaN, -3, -0, 3 * 2^-14, 3 * 85.3125 rounded to even
  const uint16_t summed[8] = {0x4200, 0x0003, 0x7c00, 0x7e00, 0xc200, 0x8000, 0x0a00, 0x5c00};
  const int32_t minima[4] = {-1, 1 << 30, -10, 7}, totals[4] = {0, static_cast<int32_t>(0xc0000000), -15, 21};
  const int32_t ored[4] = {-1, 1 << 30, -5 | -10, 7};
  CHECK(std::memcmp(&sum, sums, 16) == 0 && std::memcmp(&half, summed, 16) == 0);
  CHECK(std::memcmp(&least, minima, 16) == 0 && std::memcmp(&whole, totals, 16) == 0);
  CHECK(std::memcmp(&both, ored, 16) == 0);
  uint16_t largest[8];
  std::memcpy(largest, &brains, 16);
  CHECK(largest[0] == 0x3c00 && largest[3] == 0x7e00 && largest[4] == 0xbc00 && largest[5] == 0x8000);
  CHECK(phx_team_barrier(&s.team, 0, kLong) == 0);
  if (rank == 2) {
    phx_multicast_fence();
    phx_multicast_put(&s.team, 48, whole);
  }
  CHECK(phx_team_barrier(&s.team, 0, kLong) == 0);
  CHECK(std::memcmp(mine + 48, totals, 16) == 0);
  CHECK_OK(phx_symm_barrier(s.symm, 1, 0));
}

TEST(multicast_goes_over_the_blocks_of_the_host) { ranks::as_threads(3, multicast); }  // M32

// A ring of two channels: data goes right, room comes back left.
void stream(int rank, phx_world *world) {
  Symmetric s(world, sizeof(int64_t));
  const int right = (rank + 1) % 3, left = (rank + 2) % 3;
  auto *slot = static_cast<int64_t *>(phx_team_at(&s.team, right, 0));
  auto *mine = static_cast<int64_t *>(phx_team_at(&s.team, rank, 0));
  for (uint32_t n = 1; n <= 3000; ++n) {
    if (n > 1) CHECK(phx_team_wait(&s.team, 3, right, n - 1, kLong) == 0);
    *slot = 100 * static_cast<int64_t>(n) + rank;
    phx_team_put(&s.team, 2, right, n);
    CHECK(phx_team_last(&s.team, 2, right) == n);
    CHECK(phx_team_wait(&s.team, 2, left, n, kLong) == 0);
    CHECK(*mine == 100 * static_cast<int64_t>(n) + left);
    phx_team_put(&s.team, 3, left, n);
  }
  CHECK_OK(phx_symm_barrier(s.symm, 0, 0));
}

TEST(puts_and_waits_carry_data_around_a_ring) { ranks::as_threads(3, stream); }

void come_late(int rank, phx_world *world) {
  Symmetric s(world, 64);
  if (rank != 2) CHECK(phx_team_barrier(&s.team, 0, kShort) == 1 + 2);
  if (rank == 0) CHECK(phx_team_wait(&s.team, 5, 1, 1, kShort) == 1 + 1);
  CHECK_OK(phx_symm_barrier(s.symm, 0, 0));
}

TEST(a_rank_that_is_late_is_told) { ranks::as_threads(3, come_late); }  // M30

void fail_meanwhile(int rank, phx_world *world) {
  Symmetric s(world, 64);
  CHECK_OK(phx_symm_barrier(s.symm, 0, 0));
  if (rank == 1) {
    CHECK_OK(phx_group_revoke(s.group, "the loss is NaN"));
    return;
  }
  CHECK(phx_team_wait(&s.team, 0, 1, 1, kLong) == PHX_ERR_REVOKED);
  CHECK(phx_team_barrier(&s.team, 1, kLong) == PHX_ERR_REVOKED);
  phx_error_info why{};
  why.struct_size = sizeof why;
  CHECK_OK(phx_group_get_error(s.group, &why));
  CHECK(std::strstr(why.text, "the loss is NaN") != nullptr);
}

// Rank 2 has nothing more to do; the others have.
void leave_early(int rank, phx_world *world) {
  Symmetric s(world, 64);
  CHECK(phx_team_barrier(&s.team, 0, kLong) == 0);
  if (rank == 2) return;
  while (phx_word_get(reinterpret_cast<const uint32_t *>(&s.team.failed[2])) == 0) phx_private_pause(5000);
  const int other = 1 - rank;
  for (uint32_t n = 1; n <= 100; ++n) {
    phx_team_put(&s.team, 1, other, n);
    CHECK(phx_team_wait(&s.team, 1, other, n, kLong) == 0);
  }
  CHECK(phx_team_wait(&s.team, 1, 2, 1, kLong) == PHX_ERR_REVOKED);
  phx_team_put(&s.team, 2, other, 1);
  CHECK(phx_team_wait(&s.team, 2, other, 1, kLong) == 0);
}

TEST(a_rank_that_has_left_ends_waits_for_itself_alone) { ranks::as_threads(3, leave_early); }

TEST(a_wait_ends_when_the_group_fails) { ranks::as_threads(2, fail_meanwhile); }

TEST(counts_may_wrap_around) {
  ranks::as_threads(1, [](int, phx_world *world) {
    Symmetric s(world, 64);
    uint32_t *word = phx_team_word(&s.team, 0, 0, 0);
    phx_word_put(word, 5);  // as after 2^32 + 5
    CHECK(phx_team_wait(&s.team, 0, 0, 0xfffffff0u, kShort) == 0);
    phx_word_put(word, 0xfffffff0u);
    CHECK(phx_team_wait(&s.team, 0, 0, 5, kShort) == 1);
    CHECK(phx_team_barrier(&s.team, 0, kShort) == 0);
  });
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
