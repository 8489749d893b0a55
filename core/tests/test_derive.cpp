// Groups made of groups: split, and what survivors do: agree, shrink, abort.
#include <signal.h>

#include <chrono>
#include <cstring>
#include <random>
#include <vector>

#include "ranks.h"

namespace {

float sum_of(phx_group *group, float mine) {
  float x = mine;
  CHECK_OK(phx_all_reduce(group, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
  return x;
}

phx_group_info info_of(phx_group *group) {
  phx_group_info info{};
  info.struct_size = sizeof info;
  CHECK_OK(phx_group_get_info(group, &info));
  return info;
}

TEST(split_orders_by_key_and_gives_each_color_its_own_group) {
  ranks::as_threads(4, [](int rank, phx_world *world) {
    phx_group *all = ranks::make_group(world), *half = nullptr;
    CHECK_OK(phx_group_split(all, rank % 2, -rank, "half", 0, &half));
    const phx_group_info info = info_of(half);
    CHECK(info.group_size == 2);
    CHECK(info.group_rank == (rank < 2 ? 1 : 0));
    CHECK(info.ranks[0] == 2 + rank % 2 && info.ranks[1] == rank % 2);
    CHECK(std::strcmp(info.name, "half") == 0);
    CHECK(sum_of(half, 1 << rank) == (rank % 2 == 0 ? 1 + 4 : 2 + 8));
    CHECK(sum_of(all, 1) == 4);
    phx_group *again = nullptr;  // of a group that was itself made by a split, and under its name
    CHECK_OK(phx_group_split(half, 0, rank, nullptr, 0, &again));
    CHECK(info_of(again).group_rank == rank / 2);
    CHECK(sum_of(again, rank) == (rank % 2 == 0 ? 2 : 4));
    CHECK(info_of(again).id != info.id);
    phx_group_release(half);
    CHECK(sum_of(again, 1) == 2);
    phx_group_release(again);
    phx_group_release(all);
  });
}

TEST(a_negative_color_takes_part_and_gets_no_group) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *all = ranks::make_group(world), *some = reinterpret_cast<phx_group *>(1);
    CHECK_OK(phx_group_split(all, rank == 1 ? -1 : 7, 0, "some", 0, &some));
    CHECK((some == nullptr) == (rank == 1));
    if (some != nullptr) CHECK(sum_of(some, 1) == 2);
    CHECK(sum_of(all, 1) == 3);
    phx_group_release(some);
    phx_group_release(all);
  });
}

TEST(agree_gives_all_the_and_of_the_bits) {
  ranks::as_threads(4, [](int rank, phx_world *world) {
    phx_group *all = ranks::make_group(world);
    for (int i = 0; i < 50; ++i) {
      uint64_t bits = ~(uint64_t{1} << (rank + i % 7));
      uint8_t alive[4] = {};
      CHECK_OK(phx_group_agree(all, &bits, alive, 0));
      CHECK(bits == ~(uint64_t{15} << i % 7));
      for (uint8_t each : alive) CHECK(each == 1);
    }
    CHECK(sum_of(all, 1) == 4);
    phx_group_release(all);
  });
}

TEST(a_healthy_group_shrinks_to_one_of_the_same_ranks) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *all = ranks::make_group(world), *same = nullptr;
    CHECK_OK(phx_group_shrink(all, nullptr, 0, &same));
    CHECK(info_of(same).group_size == 3 && info_of(same).group_rank == rank);
    CHECK(sum_of(same, 1) == 3 && sum_of(all, 1) == 3);
    phx_group_release(same);
    phx_group_release(all);
  });
}

TEST(wrong_arguments_of_these_fail_before_anything_is_sent) {
  ranks::as_threads(1, [](int, phx_world *world) {
    phx_group *group = ranks::make_group(world), *none = nullptr;
    CHECK_FAILS(PHX_ERR_INVALID, "group is NULL", phx_group_shrink(nullptr, "x", 0, &none));
    CHECK_FAILS(PHX_ERR_INVALID, "out is NULL", phx_group_shrink(group, "x", 0, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "needs a name", phx_group_split(group, 0, 0, "", 0, &none));
    CHECK_FAILS(PHX_ERR_INVALID, "timeout_ms is -1", phx_group_split(group, 0, 0, "x", -1, &none));
    CHECK_FAILS(PHX_ERR_INVALID, "inout_bits is NULL", phx_group_agree(group, nullptr, nullptr, 0));
    CHECK_FAILS(PHX_ERR_INVALID, "world is NULL", phx_world_abort(nullptr, "x"));
    CHECK_OK(phx_group_shrink(group, "alone", 0, &none));
    CHECK(sum_of(none, 3) == 3);
    phx_world_finalize(world);
    uint64_t bits = 0;
    CHECK_FAILS(PHX_ERR_INVALID, "finalized", phx_group_agree(none, &bits, nullptr, 0));
    phx_group_release(none);
    phx_group_release(group);
  });
}

// Ends this process as a crash does.
[[noreturn]] void die() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

TEST(survivors_of_a_kill_shrink_and_go_on) {
  const auto codes = ranks::as_processes(4, [](int rank, phx_world *world) {
    phx_group *all = ranks::make_group(world), *rest = nullptr;
    for (int i = 0; i < 100; ++i) CHECK(sum_of(all, 1) == 4);
    if (rank == 0) die();  // the one that made the store
    float x = 1;
    CHECK_FAILS(PHX_ERR_PEER_DEAD, "rank 0 (pid",
                phx_all_reduce(all, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
    CHECK_OK(phx_group_shrink(all, "rest", 0, &rest));
    const phx_group_info info = info_of(rest);
    CHECK(info.group_size == 3 && info.group_rank == rank - 1 && info.ranks[0] == 1 && info.ranks[2] == 3);
    for (int i = 0; i < 100; ++i) CHECK(sum_of(rest, 1 << rank) == 2 + 4 + 8);
    if (rank == 2) die();  // and again, from the new group
    CHECK_FAILS(PHX_ERR_PEER_DEAD, "rank 2 (pid",
                phx_all_reduce(rest, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
    phx_group *pair = nullptr;
    CHECK_OK(phx_group_shrink(rest, "pair", 0, &pair));
    CHECK(sum_of(pair, 1 << rank) == 2 + 8);
    uint64_t bits = rank;
    uint8_t alive[4] = {};
    CHECK_OK(phx_group_agree(all, &bits, alive, 0));
    CHECK(bits == 1 && alive[0] == 0 && alive[1] == 1 && alive[2] == 0 && alive[3] == 1);
    phx_group_release(pair);
    phx_group_release(rest);
    phx_group_release(all);
  });
  CHECK(WIFSIGNALED(codes[0]) && codes[1] == 0 && WIFSIGNALED(codes[2]) && codes[3] == 0);
}

// Every rank but one may die at any moment of the shrinking; whoever lives has a group of those that live with it.
TEST(ranks_that_die_while_the_others_shrink_are_left_out) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    const auto codes = ranks::as_processes(5, [seed](int rank, phx_world *world) {
      std::mt19937 random(seed * 16 + static_cast<unsigned>(rank));
      phx_group *all = ranks::make_group(world), *rest = nullptr;
      CHECK_OK(phx_barrier(all, nullptr, nullptr));
      if (rank == 4) die();
      std::thread killer([&] {
        if (rank == 0 || random() % 2 == 0) return;
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
        die();
      });
      float x = 1;
      const phx_status failed = phx_all_reduce(all, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr);
      CHECK(failed == PHX_ERR_PEER_DEAD);
      CHECK_OK(phx_group_shrink(all, "rest", 0, &rest));
      killer.join();
      x = 1;
      phx_status status = phx_all_reduce(rest, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr);
      while (status == PHX_ERR_PEER_DEAD || status == PHX_ERR_REVOKED) {  // one died since
        phx_group *fewer = nullptr;
        CHECK_OK(phx_group_shrink(rest, "fewer", 0, &fewer));
        phx_group_release(rest);
        rest = fewer;
        x = 1;
        status = phx_all_reduce(rest, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr);
      }
      CHECK(status == PHX_OK);
      CHECK(x == static_cast<float>(info_of(rest).group_size));
      CHECK_OK(phx_barrier(rest, nullptr, nullptr));
      phx_group_release(rest);
      phx_group_release(all);
    });
    CHECK(codes[0] == 0);
    for (int code : codes) CHECK(code == 0 || (WIFSIGNALED(code) && WTERMSIG(code) == SIGKILL));
  }
}

TEST(a_stopped_rank_is_left_out_and_told_when_it_comes) {
  ranks::Options options;
  options.timeout_ms = 1000;
  const auto codes = ranks::as_processes(
      3,
      [](int rank, phx_world *world) {
        phx_group *all = ranks::make_group(world), *rest = nullptr;
        int64_t pids[3] = {}, mine = getpid();
        CHECK_OK(phx_all_gather(all, &mine, pids, 1, PHX_DTYPE_I64, nullptr, nullptr));
        float x = 1;
        if (rank == 1) {
          raise(SIGSTOP);  // until rank 0 has gone on without it
          CHECK_FAILS(PHX_ERR_REVOKED, "rank 1 came too late", phx_group_shrink(all, "rest", 0, &rest));
          CHECK(rest == nullptr);
        } else {
          CHECK_FAILS(PHX_ERR_TIMEOUT, "stopped",
                      phx_all_reduce(all, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
          CHECK_OK(phx_group_shrink(all, "rest", 2000, &rest));
          CHECK(info_of(rest).group_size == 2);
          CHECK(sum_of(rest, 1) == 2);
          if (rank == 0) kill(static_cast<pid_t>(pids[1]), SIGCONT);
          std::this_thread::sleep_for(std::chrono::milliseconds(300));  // its messages lie there to be read
        }
        phx_group_release(rest);
        phx_group_release(all);
      },
      options);
  ranks::all_zero(codes);
}

TEST(abort_ends_every_wait_of_every_thread_on_all_ranks) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *one = ranks::make_group(world, "one"), *two = ranks::make_group(world, "two");
    std::vector<std::thread> stuck;
    std::atomic<int> ended{0};
    if (rank == 0)
      for (phx_group *group : {one, two})
        stuck.emplace_back([&ended, group] {
          if (barrier_within(group, 60000) != PHX_OK && std::strstr(phx_last_error(), "had enough") != nullptr) ++ended;
        });
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      CHECK_OK(phx_world_abort(world, "had enough"));
    }
    for (std::thread &thread : stuck) thread.join();
    CHECK(rank == 1 || ended == 2);
    phx_group *fresh = nullptr;
    CHECK_OK(phx_group_shrink(one, "fresh", 0, &fresh));
    CHECK(sum_of(fresh, 1) == 2);
    for (phx_group *group : {fresh, two, one}) phx_group_release(group);
  });
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
