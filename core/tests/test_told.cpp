// How failures are told: at once, to all ranks, and whatever else a rank is doing. Timeouts are those of the caller.
#include <signal.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "pipe.h"
#include "ranks.h"
#include "world/identity.h"

namespace {

using Clock = std::chrono::steady_clock;

int64_t ms_since(Clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
}

phx_error_info last_info() {
  phx_error_info info{};
  info.struct_size = sizeof info;
  CHECK_OK(phx_last_error_info(&info));
  return info;
}

phx_options within(int64_t timeout_ms) {
  phx_options options{};
  options.struct_size = sizeof options;
  options.timeout_ms = timeout_ms;
  return options;
}

// ---- refusals: a wrong argument on one rank alone

constexpr int64_t kLongMs = 60000;  // what the others would wait if nobody told them
constexpr int64_t kAtOnceMs = 20000;

struct Buffers {
  float in[64] = {};
  float out[64] = {};
  size_t counts[3] = {4, 4, 4};
  size_t huge[3] = {SIZE_MAX, 4, 4};
  phx_options options = within(kLongMs);
  phx_options negative = within(-5);
  phx_work *work = nullptr;
};
struct Entry {
  const char *name;
  // The call with right arguments, or with a wrong one.
  phx_status (*call)(phx_group *group, phx_symm *symm, Buffers &b, bool wrong);
};

const Entry kEntries[] = {
    {"barrier", [](phx_group *g, phx_symm *, Buffers &, bool w) { return barrier_within(g, w ? -5 : kLongMs); }},
    {"all_reduce",
     [](phx_group *g, phx_symm *, Buffers &b, bool w) {
       return phx_all_reduce(g, b.in, b.out, 8, w ? 99 : PHX_DTYPE_F32, PHX_OP_SUM, &b.options, nullptr);
     }},
    {"a binding's refusal",
     [](phx_group *g, phx_symm *, Buffers &, bool w) {
       if (!w) return barrier_within(g, kLongMs);
       CHECK_OK(phx_group_refuse(g, 0, "the binding says no"));
       return phx_status{PHX_ERR_INVALID};
     }},
    {"all_gather",
     [](phx_group *g, phx_symm *, Buffers &b, bool w) {
       return phx_all_gather(g, w ? nullptr : b.in, b.out, 8, PHX_DTYPE_F32, &b.options, nullptr);
     }},
    {"all_gather_v",
     [](phx_group *g, phx_symm *, Buffers &b, bool w) {
       return phx_all_gather_v(g, b.in, b.out, w ? b.huge : b.counts, PHX_DTYPE_F32, &b.options, nullptr);
     }},
    {"reduce_scatter",
     [](phx_group *g, phx_symm *, Buffers &b, bool w) {
       return phx_reduce_scatter(g, b.in, b.out, 8, PHX_DTYPE_F32, w ? 42 : PHX_OP_SUM, &b.options, nullptr);
     }},
    {"reduce_scatter_v",
     [](phx_group *g, phx_symm *, Buffers &b, bool w) {
       return phx_reduce_scatter_v(g, b.in, b.out, w ? nullptr : b.counts, PHX_DTYPE_F32, PHX_OP_SUM, &b.options,
                                   nullptr);
     }},
    {"all_to_all",
     [](phx_group *g, phx_symm *, Buffers &b, bool w) {
       return phx_all_to_all(g, b.in, w ? b.in : b.out, 8, PHX_DTYPE_F32, &b.options, nullptr);
     }},
    {"all_to_all_v",
     [](phx_group *g, phx_symm *, Buffers &b, bool w) {
       return phx_all_to_all_v(g, b.in, w ? b.huge : b.counts, b.out, b.counts, PHX_DTYPE_F32, &b.options, nullptr);
     }},
    {"broadcast", [](phx_group *g, phx_symm *, Buffers &b,
                     bool w) { return phx_broadcast(g, b.out, 8, PHX_DTYPE_F32, w ? 7 : 1, &b.options, nullptr); }},
    {"reduce",
     [](phx_group *g, phx_symm *, Buffers &b, bool w) {
       return phx_reduce(g, b.in, b.out, 8, PHX_DTYPE_F32, PHX_OP_SUM, 0, w ? &b.negative : &b.options, nullptr);
     }},
    {"gather",
     [](phx_group *g, phx_symm *, Buffers &b, bool w) {
       return phx_gather(g, w ? nullptr : b.in, b.out, 8, PHX_DTYPE_F32, 0, &b.options, nullptr);
     }},
    {"scatter",
     [](phx_group *g, phx_symm *, Buffers &b, bool w) {
       return phx_scatter(g, b.in, w ? nullptr : b.out, 8, PHX_DTYPE_F32, 0, &b.options, nullptr);
     }},
    {"coalesced",
     [](phx_group *g, phx_symm *, Buffers &b, bool w) {
       phx_call call{};
       call.struct_size = sizeof call;
       call.kind = PHX_CALL_ALL_REDUCE;
       call.in = b.in;
       call.out = b.out;
       call.count = 8;
       call.dtype = PHX_DTYPE_F32;
       call.op = w ? 42 : PHX_OP_SUM;
       return phx_coalesced(g, &call, 1, &b.options, nullptr);
     }},
    {"a started all_reduce",
     [](phx_group *g, phx_symm *, Buffers &b, bool w) {
       phx_status status = phx_all_reduce(g, b.in, b.out, 8, PHX_DTYPE_F32, w ? 42 : PHX_OP_SUM, &b.options, &b.work);
       if (status == PHX_OK) status = phx_work_wait(b.work, kLongMs);
       phx_work_release(b.work);
       return status;
     }},
    {"symm_all_reduce",
     [](phx_group *, phx_symm *s, Buffers &b, bool w) {
       return phx_symm_all_reduce(s, w ? size_t{1} << 40 : 0, b.out, 8, PHX_DTYPE_F32, PHX_OP_SUM, &b.options, nullptr);
     }},
    {"symm_all_gather_v",
     [](phx_group *, phx_symm *s, Buffers &b, bool w) {
       return phx_symm_all_gather_v(s, 0, b.out, w ? b.huge : b.counts, PHX_DTYPE_F32, &b.options, nullptr);
     }},
    {"symm_alloc",
     [](phx_group *g, phx_symm *, Buffers &, bool w) {
       const phx_device device{PHX_DEVICE_CPU, w ? 1 : 0};
       phx_symm *made = nullptr;
       const phx_status status = phx_symm_alloc(g, &device, 4096, kLongMs, &made);
       phx_symm_release(made);
       return status;
     }},
    {"symm_rendezvous",
     [](phx_group *g, phx_symm *s, Buffers &b, bool w) {
       phx_symm *made = nullptr;
       if (w) return phx_symm_rendezvous(g, b.in, kLongMs, &made);
       (void)s;
       const phx_status status = phx_symm_alloc(g, nullptr, 4096, kLongMs, &made);
       phx_symm_release(made);
       return status;
     }},
    {"group_split",
     [](phx_group *g, phx_symm *, Buffers &, bool w) {
       phx_group *made = nullptr;
       const phx_status status = phx_group_split(g, 0, 0, w ? "" : "part", kLongMs, &made);
       phx_group_release(made);
       return status;
     }},
    {"group_set_tuning",
     [](phx_group *g, phx_symm *, Buffers &, bool w) {
       phx_tuning tuning{};
       tuning.struct_size = sizeof tuning;
       return phx_group_set_tuning(g, &tuning, w ? -5 : kLongMs);
     }},
};

bool is_refusal(phx_status status) { return status == PHX_ERR_INVALID || status == PHX_ERR_NOT_FOUND; }

void refuse(phx_world *world, const Entry &entry, bool alone, std::atomic<int> &over) {
  phx_group *group = ranks::make_group(world, entry.name);
  phx_symm *symm = nullptr;
  CHECK_OK(phx_symm_alloc(group, nullptr, 4096, 0, &symm));
  CHECK_OK(phx_barrier(group, nullptr, nullptr));
  Buffers b;
  const bool wrong = !alone || phx_world_rank(world) == 1;
  const auto begin = Clock::now();
  const phx_status status = entry.call(group, symm, b, wrong);
  CHECK(ms_since(begin) < kAtOnceMs);
  CHECK(wrong ? is_refusal(status) : status == PHX_ERR_MISMATCH);
  if (!wrong) {
    const phx_error_info info = last_info();
    CHECK(info.peer == 1);
    CHECK(std::strstr(info.text, "rank 1 (pid ") != nullptr);
    CHECK(std::strstr(info.text, "refused its own call") != nullptr);
  }
  // Once all have their error: what the one that refused says of its next call is another one.
  over += 1;
  while (over % phx_world_size(world) != 0) usleep(100);
  const phx_status after = barrier_within(group, kLongMs);
  CHECK(ms_since(begin) < kAtOnceMs);
  CHECK(alone ? after == PHX_ERR_REVOKED || after == PHX_ERR_MISMATCH : after == PHX_OK);
  phx_symm_release(symm);
  phx_group_release(group);
}

// E1
TEST(a_wrong_argument_of_one_rank_alone_ends_the_call_of_the_others_at_once) {
  for (const Entry &entry : kEntries) {
    std::fprintf(stderr, "    %s\n", entry.name);
    std::atomic<int> over{0};
    ranks::as_threads(3, [&](int, phx_world *world) { refuse(world, entry, true, over); });
  }
}

TEST(a_rank_that_refused_tells_why_though_it_is_the_first_to_see_the_difference) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    static std::atomic<int> step;
    if (rank == 0) step = 0;
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    Buffers b;
    phx_work *work = nullptr;
    if (rank == 0) {
      CHECK_OK(phx_all_reduce(group, b.in, b.out, 8, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, &work));
      ++step;
      while (step != 2) usleep(100);
      CHECK_FAILS(PHX_ERR_MISMATCH, "refused its own call", phx_work_wait(work, kLongMs));
      CHECK(last_info().peer == 1 && std::strstr(phx_last_error(), "rank 0 called all_reduce") != nullptr);
      CHECK(std::strstr(phx_last_error(), "in or out is NULL") != nullptr);
      phx_work_release(work);
    } else {
      while (step != 1) usleep(100);
      CHECK_FAILS(PHX_ERR_INVALID, "in or out is NULL",
                  phx_all_reduce(group, nullptr, b.out, 8, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
      CHECK_FAILS(PHX_ERR_MISMATCH, "refused its own call", barrier_within(group, kLongMs));
      ++step;
    }
    phx_group_release(group);
  });
}

TEST(ranks_that_refuse_alike_stay_in_step) {
  std::atomic<int> over{0};
  ranks::as_threads(3, [&](int, phx_world *world) {
    for (const Entry &entry : kEntries) refuse(world, entry, false, over);
  });
}

TEST(a_rank_that_refuses_an_agreement_is_absent_from_it_at_once) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    uint64_t bits = 5;
    uint8_t alive[3] = {};
    const auto begin = Clock::now();
    if (rank == 1) {
      CHECK_FAILS(PHX_ERR_INVALID, "inout_bits is NULL", phx_group_agree(group, nullptr, alive, kLongMs));
    } else {
      CHECK_OK(phx_group_agree(group, &bits, alive, kLongMs));
      CHECK(bits == 5 && alive[0] == 1 && alive[1] == 0 && alive[2] == 1);
    }
    CHECK(ms_since(begin) < kAtOnceMs);
    CHECK_OK(phx_group_agree(group, &bits, alive, kLongMs));  // the next one has it again
    CHECK(alive[1] == 1);
    phx_group_release(group);
  });
}

TEST(a_rank_that_refuses_to_make_a_group_ends_the_attempt_of_the_others_at_once) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    const int32_t all[] = {0, 1, 2};
    phx_group *group = nullptr;
    const auto begin = Clock::now();
    const phx_status status = phx_group_create(world, "g", all, 3, rank == 1 ? -5 : kLongMs, &group);
    CHECK(status == PHX_ERR_INVALID && group == nullptr);
    CHECK(rank == 1 || std::strstr(phx_last_error(), "rank 1 (pid ") != nullptr);
    CHECK(std::strstr(phx_last_error(), "timeout_ms is -5") != nullptr);
    CHECK(ms_since(begin) < kAtOnceMs);
    CHECK_OK(phx_group_create(world, "g", all, 3, kLongMs, &group));
    CHECK_OK(barrier_within(group, kLongMs));
    phx_group_release(group);
  });
}

// ---- timeouts

TEST(a_timeout_holds_while_another_thread_is_inside_the_channel) {
  std::atomic<bool> gave_up{false};
  ranks::as_threads(2, [&](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    float a = 1, b = 0, c = 0;
    if (rank == 1) {  // comes when the other one has given up its wait
      while (!gave_up) usleep(1000);
      for (int i = 0; i < 2; ++i)
        CHECK_OK(phx_all_reduce(group, &a, &b, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
      phx_group_release(group);
      return;
    }
    phx_options options = within(kLongMs);
    phx_work *work = nullptr;
    CHECK_OK(phx_all_reduce(group, &a, &c, 1, PHX_DTYPE_F32, PHX_OP_SUM, &options, &work));
    phx_status other = PHX_OK;
    std::thread inside([&] { other = phx_all_reduce(group, &a, &b, 1, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr); });
    phx_group_info info{};
    info.struct_size = sizeof info;
    do CHECK_OK(phx_group_get_info(group, &info));
    while (info.sequence < 3);  // the thread has begun, and holds the channel
    const auto begin = Clock::now();
    CHECK_FAILS(PHX_ERR_TIMEOUT, "another thread of this rank is inside the same channel", phx_work_wait(work, 100));
    CHECK(ms_since(begin) < kAtOnceMs);
    gave_up = true;
    inside.join();
    CHECK(other == PHX_OK && b == 2);  // the other call is none the worse for it
    CHECK_OK(phx_work_wait(work, 0));
    CHECK(c == 2);
    phx_work_release(work);
    phx_group_release(group);
  });
}

TEST(works_that_run_out_of_time_together_name_the_rank_that_did_not_come) {
  constexpr int kThreads = 4, kEach = 4, kGroups = 25;
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const int32_t both[] = {0, 1};
    for (int i = 0; i < kGroups; ++i) {
      phx_group *group = nullptr;
      CHECK_OK(phx_group_create(world, ("g" + std::to_string(i)).c_str(), both, 2, kLongMs, &group));
      if (rank == 0) {
        float a = 1, sums[kThreads * kEach]{};
        phx_work *works[kThreads * kEach]{};
        const phx_options options = within(kLongMs);
        for (size_t k = 0; k < std::size(works); ++k)
          CHECK_OK(phx_all_reduce(group, &a, &sums[k], 1, PHX_DTYPE_F32, PHX_OP_SUM, &options, &works[k]));
        std::atomic<int> ready{0};
        std::vector<std::thread> threads;
        for (int t = 0; t < kThreads; ++t)
          threads.emplace_back([&, t] {
            for (++ready; ready < kThreads;) std::this_thread::yield();
            for (int k = 0; k < kEach; ++k)
              CHECK_FAILS(PHX_ERR_TIMEOUT, "still waits for rank 1", phx_work_expire(works[t * kEach + k], 30));
          });
        for (std::thread &thread : threads) thread.join();
        for (phx_work *work : works) phx_work_release(work);
      } else {
        phx_error_info cause{};
        cause.struct_size = sizeof cause;
        while (phx_group_get_error(group, &cause) == PHX_ERR_NOT_FOUND) usleep(1000);
      }
      phx_group_release(group);
    }
  });
}

TEST(a_timeout_holds_while_another_thread_is_in_a_rendezvous_or_barrier) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    phx_symm *symm = nullptr;
    CHECK_OK(phx_symm_alloc(group, nullptr, 4096, 0, &symm));
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    if (rank == 1) {
      CHECK_OK(phx_symm_wait_signal(symm, 0, 1, kLongMs));
      CHECK_OK(phx_symm_barrier(symm, 0, kLongMs));
      phx_error_info cause{};
      cause.struct_size = sizeof cause;
      while (phx_group_get_error(group, &cause) == PHX_ERR_NOT_FOUND) usleep(1000);
    } else {
      phx_status first = PHX_OK;
      std::thread inside([&] { first = phx_symm_barrier(symm, 0, kLongMs); });
      const auto begin = Clock::now();
      while (phx_symm_barrier(symm, 0, 20) != PHX_ERR_TIMEOUT) {
      }  // whoever is first: both wait for a rank that does not come
      CHECK(ms_since(begin) < kAtOnceMs);
      CHECK_OK(phx_symm_put_signal(symm, 1, 1));
      inside.join();
      CHECK_OK(first);
      phx_symm *a = nullptr, *b = nullptr;
      std::thread meets([&] { first = phx_symm_alloc(group, nullptr, 4096, kLongMs, &a); });
      CHECK(phx_symm_alloc(group, nullptr, 4096, 100, &b) == PHX_ERR_TIMEOUT);
      meets.join();
      CHECK(first != PHX_OK);
      CHECK(ms_since(begin) < kAtOnceMs);
    }
    phx_symm_release(symm);
    phx_group_release(group);
  });
}

TEST(a_timeout_is_positive_or_zero_for_the_default_and_may_be_as_long_as_its_type) {
  ranks::as_threads(2, [](int, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    float a = 1, b = 0;
    for (const int64_t timeout_ms : {int64_t{0}, INT64_MAX, INT64_MAX - 1, int64_t{1} << 40}) {
      phx_options options = within(timeout_ms);
      CHECK_OK(phx_all_reduce(group, &a, &b, 1, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
      CHECK(b == 2);
      phx_work *work = nullptr;
      CHECK_OK(phx_all_reduce(group, &a, &b, 1, PHX_DTYPE_F32, PHX_OP_SUM, &options, &work));
      CHECK_FAILS(PHX_ERR_INVALID, "timeout_ms is -1", phx_work_wait(work, -1));
      CHECK_FAILS(PHX_ERR_INVALID, "timeout_ms is -9223372036854775808", phx_work_wait(work, INT64_MIN));
      CHECK_OK(phx_work_wait(work, timeout_ms));
      phx_work_release(work);
      CHECK_OK(barrier_within(group, timeout_ms));
      phx_symm *symm = nullptr;
      CHECK_OK(phx_symm_alloc(group, nullptr, 64, timeout_ms, &symm));
      CHECK_OK(phx_symm_barrier(symm, 0, timeout_ms));
      phx_symm_release(symm);
      uint64_t bits = 3;
      CHECK_OK(phx_group_agree(group, &bits, nullptr, timeout_ms));
      phx_group *made = nullptr;
      CHECK_OK(phx_group_split(group, 0, 0, nullptr, timeout_ms, &made));
      phx_group_release(made);
      const int32_t all[] = {0, 1};
      CHECK_OK(phx_group_create(world, "again", all, 2, timeout_ms, &made));
      phx_group_release(made);
    }
    phx_group_release(group);
  });
}

TEST(every_timeout_says_that_it_timed_out_and_what_set_the_limit) {
  ranks::Options options;
  options.timeout_ms = 60;
  ranks::as_threads(
      2,
      [](int rank, phx_world *world) {
        const int32_t both[] = {0, 1};
        phx_group *group = nullptr, *none = nullptr;
        CHECK_OK(phx_group_create(world, "g", both, 2, kLongMs, &group));
        phx_symm *symm = nullptr;
        CHECK_OK(phx_symm_alloc(group, nullptr, 64, kLongMs, &symm));
        CHECK_OK(barrier_within(group, kLongMs));
        if (rank == 0) {
          CHECK_FAILS(PHX_ERR_TIMEOUT, "timed out after 60 ms (the default of the world)",
                      phx_symm_wait_signal(symm, 1, 1, 0));
          CHECK_FAILS(PHX_ERR_TIMEOUT, "timed out after 60 ms (the default of the world)",
                      phx_group_create(world, "lonely", both, 2, 0, &none));
          CHECK_OK(phx_group_set_timeout(group, 40));
          CHECK_FAILS(PHX_ERR_TIMEOUT, "timed out after 40 ms (the timeout of the group)",
                      phx_symm_wait_signal(symm, 1, 1, 0));
          CHECK_FAILS(PHX_ERR_TIMEOUT, "timed out after 60 ms (the timeout_ms of this call)",
                      phx_symm_wait_signal(symm, 1, 1, 60));
          phx_store *store = nullptr;
          CHECK_OK(phx_store_memory(&store));
          char byte = 0;
          size_t size = 0;
          CHECK_FAILS(PHX_ERR_TIMEOUT, "timed out after 20 ms (the timeout_ms of this call)",
                      phx_store_get(store, "none", &byte, 1, &size, 20));
          phx_store_release(store);
          // A wait that the caller has kept the time of, as long as the default of the group.
          float a = 1, b = 0;
          const phx_options long_enough = within(kLongMs);
          phx_work *work = nullptr;
          CHECK_OK(phx_all_reduce(group, &a, &b, 1, PHX_DTYPE_F32, PHX_OP_SUM, &long_enough, &work));
          CHECK_FAILS(PHX_ERR_INVALID, "timeout_ms is -1", phx_work_expire(work, -1));
          CHECK(phx_work_test(work) == PHX_IN_PROGRESS);
          CHECK_FAILS(PHX_ERR_TIMEOUT, "timed out after 40 ms (the timeout of the group)", phx_work_expire(work, 0));
          phx_work_release(work);
        } else {
          while (phx_world_check(world) == PHX_OK) std::this_thread::yield();
          const phx_options long_enough = within(kLongMs);
          float a = 1, b = 0;
          CHECK_FAILS(PHX_ERR_TIMEOUT, "timed out after 40 ms (the timeout of the group)",
                      phx_all_reduce(group, &a, &b, 1, PHX_DTYPE_F32, PHX_OP_SUM, &long_enough, nullptr));
        }
        phx_symm_release(symm);
        phx_group_release(group);
      },
      options);
}

// ---- many groups

ranks::Options small_groups() {
  ranks::Options options;
  options.staging_bytes = 4096;
  options.timeout_ms = kLongMs;
  return options;
}

std::vector<phx_group *> make_groups(phx_world *world, int count) {
  std::vector<phx_group *> groups;
  for (int i = 0; i < count; ++i) groups.push_back(ranks::make_group(world, ("g" + std::to_string(i)).c_str()));
  CHECK_OK(phx_barrier(groups[0], nullptr, nullptr));
  return groups;
}

bool has_failed(phx_group *group, phx_error_info *cause) {
  cause->struct_size = sizeof *cause;
  return phx_group_get_error(group, cause) == PHX_OK;
}

// E2: a peer that takes nothing holds nobody up.
TEST(a_death_is_known_in_hundreds_of_groups_though_another_rank_takes_no_messages) {
  const Pipe stopped;
  const std::vector<int> codes = ranks::as_processes(
      3,
      [&](int rank, phx_world *world) {
        const std::vector<phx_group *> groups = make_groups(world, 400);
        if (rank == 1) {
          for (int i = 0; i < 2; ++i) stopped.send(getpid());
          raise(SIGSTOP);
          return;
        }
        const pid_t peer = stopped.receive<pid_t>();
        if (rank == 2) {
          while (std::strcmp(phx::process_state(peer), "stopped") != 0) usleep(1000);
          kill(getpid(), SIGKILL);
        }
        phx_error_info cause{};
        while (!has_failed(groups[0], &cause) && !has_failed(groups.back(), &cause)) usleep(200);
        const auto first = Clock::now();
        for (phx_group *group : groups) {
          while (!has_failed(group, &cause)) {
            CHECK(ms_since(first) < 1500);  // it took 10 ms for each group that the stopped rank was told of
            usleep(200);
          }
          CHECK(cause.status == PHX_ERR_PEER_DEAD && cause.peer == 2);
        }
        kill(peer, SIGCONT);
        for (phx_group *group : groups) phx_group_release(group);
      },
      small_groups());
  CHECK(codes[0] == 0 && WIFSIGNALED(codes[2]));
}

TEST(what_a_rank_says_last_reaches_a_peer_that_had_no_room_for_it) {
  const Pipe stopped;
  ranks::all_zero(ranks::as_processes(
      2,
      [&](int rank, phx_world *world) {
        const std::vector<phx_group *> groups = make_groups(world, 300);
        phx_error_info cause{};
        if (rank == 1) {
          stopped.send(getpid());
          raise(SIGSTOP);
          for (phx_group *group : groups) {
            while (!has_failed(group, &cause)) usleep(200);
            CHECK(cause.status == PHX_ERR_REVOKED && std::strstr(cause.text, "because") != nullptr);
          }
        } else {
          const pid_t peer = stopped.receive<pid_t>();
          while (std::strcmp(phx::process_state(peer), "stopped") != 0) usleep(1000);
          for (phx_group *group : groups) CHECK_OK(phx_group_revoke(group, "because"));
          kill(peer, SIGCONT);  // and leaves at once
        }
        for (phx_group *group : groups) phx_group_release(group);
      },
      small_groups()));
}

TEST(many_rendezvous_of_different_groups_may_be_under_way_at_once) {
  constexpr int kGroups = 60;
  ranks::all_zero(ranks::as_processes(
      2,
      [&](int rank, phx_world *world) {
        const std::vector<phx_group *> groups = make_groups(world, kGroups);
        if (rank == 1) usleep(200000);  // whatever has come by now: it must not matter
        std::vector<phx_symm *> symms(kGroups);
        std::vector<phx_status> statuses(kGroups, PHX_IN_PROGRESS);
        std::vector<std::thread> threads;
        for (int i = 0; i < kGroups; ++i)
          threads.emplace_back([&, i] { statuses[i] = phx_symm_alloc(groups[i], nullptr, 64, kLongMs, &symms[i]); });
        for (std::thread &thread : threads) thread.join();
        for (const phx_status status : statuses) CHECK(status == PHX_OK);
        CHECK_OK(phx_barrier(groups[0], nullptr, nullptr));
        for (int i = 0; i < kGroups; ++i) {
          phx_symm_release(symms[i]);
          phx_group_release(groups[i]);
        }
      },
      small_groups()));
}

// ---- a rank that died before a group's first use

TEST(a_group_that_needs_a_dead_rank_is_given_up_at_once) {
  const std::vector<int> codes = ranks::as_processes(3, [&](int rank, phx_world *world) {
    phx_group *all = ranks::make_group(world);
    CHECK_OK(phx_barrier(all, nullptr, nullptr));
    if (rank == 2) kill(getpid(), SIGKILL);
    const auto begin = Clock::now();
    while (phx_world_check_peer(world, 2) == PHX_OK) {
      CHECK(ms_since(begin) < kAtOnceMs);
      usleep(200);
    }
    CHECK_FAILS(PHX_ERR_PEER_DEAD, "rank 2 (pid ", phx_world_check_peer(world, 2));
    CHECK_OK(phx_world_check_peer(world, 0));
    CHECK_OK(phx_world_check_peer(world, 1));

    const int32_t ranks[] = {0, 1, 2};
    phx_group *none = nullptr;
    CHECK_FAILS(PHX_ERR_PEER_DEAD, "rank 2 (pid ", phx_group_create(world, "later", ranks, 3, kLongMs, &none));

    CHECK(ms_since(begin) < kAtOnceMs && none == nullptr);
    phx_group_release(all);
  });
  CHECK(codes[0] == 0 && codes[1] == 0 && WIFSIGNALED(codes[2]));
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
