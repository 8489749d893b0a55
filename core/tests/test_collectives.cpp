// Every collective gives the values of a straightforward computation, for many sizes, ranks and chunkings.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "ranks.h"

namespace {

const phx_options kBuffered = [] {
  phx_options options = PHX_OPTIONS_INIT;
  options.flags = PHX_OPTION_BUFFERED;
  return options;
}();

// What rank r contributes at element i: small integers, so that sums are exact in every dtype that is used here.
int value(int rank, size_t i) { return static_cast<int>((i * 7 + static_cast<size_t>(rank) * 13) % 11) - 5; }

const size_t kCounts[] = {0, 1, 3, 63, 64, 65, 1000, 5001, 100003};

void check_all_reduce(phx_group *group, int rank, int n, size_t count, int32_t algo, bool async) {
  phx_options options{};
  options.struct_size = sizeof options;
  options.algo = algo;
  std::vector<float> in(count), out(count, -99.0f);
  for (size_t i = 0; i < count; ++i) in[i] = static_cast<float>(value(rank, i));
  phx_work *work = nullptr;
  CHECK_OK(phx_all_reduce(group, in.data(), out.data(), count, PHX_DTYPE_F32, PHX_OP_SUM, &options,
                          async ? &work : nullptr));
  if (async) {
    CHECK_OK(phx_work_wait(work, 0));
    phx_work_release(work);
  }
  for (size_t i = 0; i < count; ++i) {
    int expected = 0;
    for (int r = 0; r < n; ++r) expected += value(r, i);
    CHECK(out[i] == static_cast<float>(expected));
  }
}

// Each rank sends `counts(from, to)` elements to each. `starts`: by a work, and the input changes before the wait.
template <class Counts>
void check_all_to_all_v(phx_group *group, int rank, int n, bool starts, const Counts &counts) {
  std::vector<size_t> ins(n), outs(n);
  size_t in_total = 0, out_total = 0;
  for (int r = 0; r < n; ++r) {
    in_total += ins[r] = counts(rank, r);
    out_total += outs[r] = counts(r, rank);
  }
  std::vector<int32_t> in(in_total), out(out_total, -99);
  size_t at = 0;
  for (int r = 0; r < n; ++r)
    for (size_t i = 0; i < ins[r]; ++i) in[at++] = value(rank * 31 + r, i);
  phx_group_stats info = PHX_GROUP_STATS_INIT;
  CHECK_OK(phx_group_get_stats(group, &info));
  phx_work *work = nullptr;
  CHECK_OK(phx_all_to_all_v(group, in.data(), ins.data(), out.data(), outs.data(), PHX_DTYPE_I32, &kBuffered,
                            starts ? &work : nullptr));
  if (starts) {
    if (in_total * sizeof(int32_t) <= info.eager_bytes) std::fill(in.begin(), in.end(), -1);
    CHECK_OK(phx_work_wait(work, 0));
    phx_work_release(work);
  }
  at = 0;
  for (int r = 0; r < n; ++r)
    for (size_t i = 0; i < outs[r]; ++i) CHECK(out[at++] == value(r * 31 + rank, i));
}

void exercise(int rank, phx_world *world) {
  const int n = phx_world_size(world);
  phx_group *group = ranks::make_group(world);
  for (size_t count : kCounts) {
    for (const phx_algo algo : std::initializer_list<phx_algo>{PHX_ALGO_AUTO, PHX_ALGO_ONE_SHOT, PHX_ALGO_TWO_SHOT}) {
      check_all_reduce(group, rank, n, count, algo, false);
      check_all_reduce(group, rank, n, count, algo, true);
    }
    {  // in place
      std::vector<double> data(count);
      for (size_t i = 0; i < count; ++i) data[i] = value(rank, i);
      CHECK_OK(phx_all_reduce(group, data.data(), data.data(), count, PHX_DTYPE_F64, PHX_OP_MAX, nullptr, nullptr));
      for (size_t i = 0; i < count; ++i) {
        int expected = value(0, i);
        for (int r = 1; r < n; ++r) expected = std::max(expected, value(r, i));
        CHECK(data[i] == expected);
      }
    }
    {
      std::vector<int32_t> in(count), out(count * n, -99);
      for (size_t i = 0; i < count; ++i) in[i] = value(rank, i);
      CHECK_OK(phx_all_gather(group, in.data(), out.data(), count, PHX_DTYPE_I32, nullptr, nullptr));
      for (int r = 0; r < n; ++r)
        for (size_t i = 0; i < count; ++i) CHECK(out[r * count + i] == value(r, i));
    }
    {
      std::vector<int64_t> in(count * n), out(count, -99);
      for (size_t i = 0; i < in.size(); ++i) in[i] = value(rank, i);
      CHECK_OK(phx_reduce_scatter(group, in.data(), out.data(), count, PHX_DTYPE_I64, PHX_OP_SUM, nullptr, nullptr));
      for (size_t i = 0; i < count; ++i) {
        int64_t expected = 0;
        for (int r = 0; r < n; ++r) expected += value(r, rank * count + i);
        CHECK(out[i] == expected);
      }
    }
    {
      std::vector<float> in(count * n), out(count * n, -99.0f);
      for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(value(rank, i));
      CHECK_OK(phx_all_to_all(group, in.data(), out.data(), count, PHX_DTYPE_F32, nullptr, nullptr));
      for (int r = 0; r < n; ++r)
        for (size_t i = 0; i < count; ++i) CHECK(out[r * count + i] == static_cast<float>(value(r, rank * count + i)));
    }
    for (int root = 0; root < n; ++root) {
      std::vector<int32_t> data(count);
      for (size_t i = 0; i < count; ++i) data[i] = value(rank, i);
      CHECK_OK(phx_broadcast(group, data.data(), count, PHX_DTYPE_I32, root, nullptr, nullptr));
      for (size_t i = 0; i < count; ++i) CHECK(data[i] == value(root, i));
    }
    for (const bool starts : {false, true}) {
      check_all_to_all_v(group, rank, n, starts, [&](int from, int to) { return (from + to) % 3 * count; });
      check_all_to_all_v(group, rank, n, starts, [&](int, int) { return count; });
      // The counts of rank 0 are all equal, those of others are not.
      check_all_to_all_v(group, rank, n, starts,
                         [&](int from, int to) { return (from == 0 || to == 0 ? 1 : from + to) * count; });
    }
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
  }
  phx_group_release(group);
}

TEST(collectives_among_threads_give_the_reference_values) {
  for (int n : {1, 2, 3, 4}) ranks::as_threads(n, exercise);
}

TEST(tiny_staging_slots_reach_the_chunked_paths) {
  ranks::Options options;
  options.staging_bytes = 512;
  for (int n : {2, 3})
    ranks::as_threads(
        n,
        [](int rank, phx_world *world) {
          const int size = phx_world_size(world);
          phx_group *group = ranks::make_group(world);
          for (size_t count : {size_t{100}, size_t{1000}, size_t{3001}}) {
            check_all_reduce(group, rank, size, count, PHX_ALGO_AUTO, false);
            check_all_reduce(group, rank, size, count, PHX_ALGO_AUTO, true);
            for (const bool starts : {false, true}) {
              check_all_to_all_v(group, rank, size, starts, [&](int, int) { return count; });
              check_all_to_all_v(group, rank, size, starts,
                                 [&](int from, int to) { return (from == 0 || to == 0 ? 1 : from + to) * count; });
            }
          }
          phx_group_release(group);
        },
        options);
}

TEST(collectives_among_processes_give_the_reference_values) {
  for (int n : {2, 4}) ranks::all_zero(ranks::as_processes(n, exercise));
}

TEST(many_started_collectives_complete_in_any_order_of_waiting) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    const int n = phx_world_size(world);
    phx_group *group = ranks::make_group(world);
    constexpr int kInFlight = 23;
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::vector<std::vector<float>> in(kInFlight), out(kInFlight);
      std::vector<phx_work *> works(kInFlight);
      for (int k = 0; k < kInFlight; ++k) {
        const size_t count = k % 5 == 4 ? 200000 : 10 + k;
        in[k].assign(count, 0);
        out[k].assign(count, 0);
        for (size_t i = 0; i < count; ++i) in[k][i] = static_cast<float>(value(rank + k, i));
        CHECK_OK(
            phx_all_reduce(group, in[k].data(), out[k].data(), count, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, &works[k]));
      }
      for (int j = 0; j < kInFlight; ++j) {
        const int k = rank == 1 ? kInFlight - 1 - j : j;  // ranks need not wait in the same order
        if (k % 2 == 0) {
          phx_status status = phx_work_test(works[k]);
          CHECK(status == PHX_OK || status == PHX_IN_PROGRESS);
        }
        CHECK_OK(phx_work_wait(works[k], 0));
        CHECK_OK(phx_work_wait(works[k], 0));  // idempotent
        phx_work_release(works[k]);
        for (size_t i = 0; i < in[k].size(); ++i) {
          int expected = 0;
          for (int r = 0; r < n; ++r) expected += value(r + k, i);
          CHECK(out[k][i] == static_cast<float>(expected));
        }
      }
    }
    phx_group_release(group);
  });
}

TEST(a_buffered_input_may_change_as_soon_as_the_start_returns) {
  for (int size : {2, 3})
    ranks::as_threads(size, [](int rank, phx_world *world) {
      const size_t n = phx_world_size(world);
      phx_group *group = ranks::make_group(world);
      phx_group_stats info = PHX_GROUP_STATS_INIT;
      CHECK_OK(phx_group_get_stats(group, &info));
      const size_t count = info.eager_bytes / sizeof(float);
      const float mine = static_cast<float>(rank + 1), sum = static_cast<float>(n * (n + 1) / 2);
      std::vector<float> in(count), out(count);
      auto overwritten = [&](auto start) {  // runs one collective whose input is destroyed before the wait
        phx_work *work = nullptr;
        std::fill(in.begin(), in.end(), mine);
        start(&work);
        std::fill(in.begin(), in.end(), 1000.0f);
        CHECK_OK(phx_work_wait(work, 0));
        phx_work_release(work);
      };
      overwritten([&](phx_work **work) {
        CHECK_OK(phx_all_reduce(group, in.data(), out.data(), count, PHX_DTYPE_F32, PHX_OP_SUM, &kBuffered, work));
      });
      for (float x : out) CHECK(x == sum);
      overwritten([&](phx_work **work) {
        CHECK_OK(
            phx_reduce_scatter(group, in.data(), out.data(), count / n, PHX_DTYPE_F32, PHX_OP_SUM, &kBuffered, work));
      });
      for (size_t i = 0; i < count / n; ++i) CHECK(out[i] == sum);
      overwritten([&](phx_work **work) {
        CHECK_OK(phx_all_to_all(group, in.data(), out.data(), count / n, PHX_DTYPE_F32, &kBuffered, work));
      });
      for (size_t i = 0; i < count; ++i) CHECK(out[i] == static_cast<float>(i / (count / n) + 1));
      const std::vector<size_t> each(n, count / n);
      overwritten([&](phx_work **work) {
        CHECK_OK(
            phx_all_to_all_v(group, in.data(), each.data(), out.data(), each.data(), PHX_DTYPE_F32, &kBuffered, work));
      });
      for (size_t i = 0; i < count; ++i) CHECK(out[i] == static_cast<float>(i / (count / n) + 1));
      phx_group_release(group);
    });
}

TEST(a_started_all_to_all_v_lets_others_start_behind_it) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    int32_t in[4] = {rank, rank, rank, rank}, out[4] = {}, more = 1;
    const size_t each[2] = {2, 2};
    phx_work *first = nullptr, *second = nullptr;
    CHECK_OK(phx_all_to_all_v(group, in, each, out, each, PHX_DTYPE_I32, nullptr, &first));
    CHECK_OK(phx_all_reduce(group, &more, &more, 1, PHX_DTYPE_I32, PHX_OP_SUM, nullptr, &second));
    CHECK_OK(phx_work_wait(second, 0));
    CHECK_OK(phx_work_wait(first, 0));
    CHECK(more == 2 && out[0] == 0 && out[1] == 0 && out[2] == 1 && out[3] == 1);
    phx_work_release(first);
    phx_work_release(second);
    phx_group_release(group);
  });
}

TEST(all_ranks_hear_that_counts_differ_which_are_equal_on_each_rank) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    const size_t own = rank == 1 ? 2 : 1, each[3] = {own, own, own};
    int32_t in[6] = {}, out[6] = {}, x = 1;
    CHECK(phx_all_to_all_v(group, in, each, out, each, PHX_DTYPE_I32, nullptr, nullptr) == PHX_ERR_MISMATCH);
    CHECK(std::string(phx_last_error()).find("group rank 0 sends 1 elements to group rank 1, which expects 2") !=
          std::string::npos);
    CHECK_OK(phx_all_reduce(group, &x, &x, 1, PHX_DTYPE_I32, PHX_OP_SUM, nullptr, nullptr));
    CHECK(x == 3);
    phx_group_release(group);
  });
}

TEST(a_test_loop_alone_completes_a_collective_of_many_rounds) {
  ranks::Options options;
  options.staging_bytes = 1024;
  ranks::as_threads(
      2,
      [](int rank, phx_world *world) {
        phx_group *group = ranks::make_group(world);
        std::vector<float> in(10000, static_cast<float>(rank + 1)), out(10000);
        phx_work *work = nullptr;
        CHECK_OK(phx_all_reduce(group, in.data(), out.data(), in.size(), PHX_DTYPE_F32, PHX_OP_SUM, nullptr, &work));
        phx_status status;
        while ((status = phx_work_test(work)) == PHX_IN_PROGRESS) std::this_thread::yield();
        CHECK(status == PHX_OK);
        phx_work_release(work);
        for (float x : out) CHECK(x == 3.0f);
        phx_group_release(group);
      },
      options);
}

TEST(subgroups_and_larger_groups_do_not_disturb_each_other) {  // M20
  ranks::as_threads(4, [](int rank, phx_world *world) {
    phx_group *all = ranks::make_group(world);
    const int32_t pairs[2][2] = {{0, 2}, {3, 1}};
    phx_group *pair = nullptr;
    CHECK_OK(phx_group_create(world, "pair", pairs[rank % 2], 2, 0, &pair));
    for (int i = 0; i < 200; ++i) {
      int32_t x = rank, y = rank;
      if (rank % 2 == 0) CHECK_OK(phx_all_reduce(pair, &x, &x, 1, PHX_DTYPE_I32, PHX_OP_SUM, nullptr, nullptr));
      CHECK_OK(phx_all_reduce(all, &y, &y, 1, PHX_DTYPE_I32, PHX_OP_SUM, nullptr, nullptr));
      if (rank % 2 == 1) CHECK_OK(phx_all_reduce(pair, &x, &x, 1, PHX_DTYPE_I32, PHX_OP_SUM, nullptr, nullptr));
      CHECK(x == (rank % 2 == 0 ? 2 : 4));
      CHECK(y == 6);
    }
    phx_group_release(pair);
    phx_group_release(all);
  });
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
