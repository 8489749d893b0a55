// What groups and symmetric allocations cost while they live, and that they leave nothing. N3
#include <dirent.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "base/hash.h"
#include "memory_use.h"
#include "ranks.h"
#include "world/identity.h"
#include "world/monitor.h"

namespace {

std::atomic<size_t> memory_ends_at{SIZE_MAX};  // pages can be had for no range that is so long

}  // namespace

// Instead of the C library's, in this program.
extern "C" int madvise(void *begin, size_t bytes, int advice) noexcept {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE
  if (advice == kPopulateWrite && bytes >= memory_ends_at.load()) {
    errno = ENOMEM;
    return -1;
  }
  return static_cast<int>(syscall(SYS_madvise, begin, bytes, advice));
}

namespace {

using memory_use::kCounts;

long pss_kib() { return memory_use::kib("/proc/self/smaps_rollup", "Pss:"); }

struct Held {
  long maps = 0, fds = 0;
  size_t heap = 0;
};
Held held() {
  Held now;
  FILE *file = std::fopen("/proc/self/maps", "r");
  for (int c; (c = std::fgetc(file)) != EOF;) now.maps += c == '\n';
  std::fclose(file);
  DIR *directory = opendir("/proc/self/fd");
  while (readdir(directory) != nullptr) ++now.fds;
  closedir(directory);
  now.heap = mallinfo2().uordblks;
  return now;
}

// While no rank makes or frees anything: descriptors on their way are held by who is to receive them.
Held held_at_rest(phx_group *group) {
  CHECK_OK(phx_barrier(group, nullptr, nullptr));
  const Held now = held();
  CHECK_OK(phx_barrier(group, nullptr, nullptr));
  return now;
}

void with_processes(int size, const ranks::Body &body) { ranks::all_zero(ranks::as_processes(size, body)); }

TEST(an_unused_group_has_at_most_64_KiB_a_rank) {
  constexpr int kGroups = 32;
  for (const int size : {2, 4}) {
    with_processes(size, [size](int, phx_world *world) {
      phx_group *first = ranks::make_group(world, "first");
      const Held before = held_at_rest(first);
      const long resident = pss_kib();
      std::vector<phx_group *> groups;
      for (int i = 0; i < kGroups; ++i) groups.push_back(ranks::make_group(world, "more"));
      CHECK_OK(phx_barrier(first, nullptr, nullptr));
      const Held after = held();
      const long now = pss_kib();
      CHECK_OK(phx_barrier(first, nullptr, nullptr));  // nobody drops its share of the pages before all have looked
      if (kCounts) {
        CHECK(after.maps - before.maps <= kGroups * size + 4);
        CHECK(after.fds == before.fds);
        if (resident >= 0) CHECK(now - resident <= kGroups * 64);
      }
      for (phx_group *group : groups) phx_group_release(group);
      phx_group_release(first);
    });
  }
}

// Every kind of reach: within the first bytes of a slot, beyond them, and all of it, in turns and on a later channel.
TEST(staging_that_comes_with_use_gives_the_right_numbers) {
  with_processes(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    for (const size_t count : {1u, 3000u, 1u, 50000u, 700000u, 900u, 5000u}) {
      for (const uint32_t channel : {0u, 2u}) {
        phx_options options{};
        options.struct_size = sizeof options;
        options.scale = 1.0;
        options.channel = channel;
        std::vector<int32_t> in(count), out(count), gathered(3 * count);
        for (size_t i = 0; i < count; ++i) in[i] = static_cast<int32_t>(i) * (rank + 1);
        CHECK_OK(phx_all_reduce(group, in.data(), out.data(), count, PHX_DTYPE_I32, PHX_OP_SUM, &options, nullptr));
        CHECK_OK(phx_all_gather(group, in.data(), gathered.data(), count, PHX_DTYPE_I32, &options, nullptr));
        for (size_t i = 0; i < count; ++i) {
          CHECK(out[i] == static_cast<int32_t>(i) * 6);
          for (size_t r = 0; r < 3; ++r) CHECK(gathered[r * count + i] == static_cast<int32_t>(i * (r + 1)));
        }
      }
    }
    phx_group_release(group);
  });
}

TEST(a_host_without_memory_for_staging_fails_the_call_and_the_group_by_name) {
  with_processes(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world, "poor");
    std::vector<float> data(100000, 1.0f);
    float few[4] = {1, 2, 3, 4};
    CHECK_OK(phx_all_reduce(group, few, few, 4, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
    if (rank == 1) memory_ends_at.store(size_t{32} << 10);
    const auto call = [&] {
      return phx_all_reduce(group, data.data(), data.data(), data.size(), PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr);
    };
    CHECK_FAILS(PHX_ERR_NO_MEMORY, "rank 1", call());
    CHECK(std::strstr(phx_last_error(), "all_reduce #2 on group 'poor'") != nullptr);
    CHECK(std::strstr(phx_last_error(), "ran out of memory for the staging") != nullptr);
    CHECK_FAILS(PHX_ERR_REVOKED, "ran out of memory", call());
    memory_ends_at.store(SIZE_MAX);
    phx_group_release(group);
    // The next group is whole again.
    group = ranks::make_group(world, "poor");
    CHECK_OK(call());
    phx_group_release(group);
  });
}

TEST(groups_that_are_dropped_leave_nothing) {
  constexpr int kGroups = 500;
  with_processes(2, [](int, phx_world *world) {
    phx_group *first = ranks::make_group(world, "first");
    const auto make = [&](bool own_names) {
      for (int i = 0; i < kGroups; ++i) {
        phx_group *group = ranks::make_group(world, own_names ? ("g" + std::to_string(i)).c_str() : "g");
        uint64_t bits = 1;
        if (i % 50 == 0) CHECK_OK(phx_group_agree(group, &bits, nullptr, 0));  // has messages that come late
        phx_group_release(group);
      }
    };
    make(false);
    const Held before = held_at_rest(first);
    make(false);
    const Held same = held_at_rest(first);
    make(true);
    const Held others = held_at_rest(first);
    if (kCounts) {
      CHECK(same.maps - before.maps <= 4 && same.fds - before.fds <= 2);
      CHECK(same.heap <= before.heap + kGroups * 8);
      CHECK(others.maps - before.maps <= 4 && others.fds - before.fds <= 2);
      CHECK(others.heap <= same.heap + kGroups * 100);  // a number for each name that was used
    }
    phx_group_release(first);
  });
}

// Each of them tells the others in the store that it has failed; once all are at the next one, nobody reads that.
TEST(attempts_that_fail_leave_nothing_in_process_or_store) {
  constexpr int kAttempts = 20;
  ranks::FileStore file;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 2; ++rank) {
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      int code = 1;
      try {
        phx_store *store = nullptr;
        CHECK_OK(phx_store_file(file.path().c_str(), &store));
        phx_world_params params{};
        params.struct_size = sizeof params;
        params.rank = rank;
        params.size = 2;
        params.store = store;
        params.timeout_ms = 20000;
        params.channels = rank == 0 ? 4 : 5;
        phx_world *world = nullptr;
        CHECK_OK(phx_world_create(&params, &world));
        const int32_t both[2] = {0, 1};
        phx_group *group = nullptr;
        Held before;
        for (int i = 0; i < kAttempts; ++i) {
          if (i == kAttempts / 2) before = held();
          CHECK_FAILS(PHX_ERR_MISMATCH, "channels", phx_group_create(world, "g", both, 2, 0, &group));
        }
        const Held after = held();
        if (kCounts) CHECK(after.fds <= before.fds + 2 && after.maps <= before.maps + 2);
        const std::string key = "phalanx/group/g/" + std::to_string(phx::hash_bytes(both, sizeof both));
        const auto left = [&](int attempt) {
          char value[4096];
          size_t size = 0;
          const std::string failed = key + "/" + std::to_string(attempt) + "/failed";
          return phx_store_get(store, failed.c_str(), value, sizeof value, &size, 1) == PHX_OK;
        };
        for (int i = 0; i + 1 < kAttempts; ++i) CHECK(!left(i));
        phx_world_release(world);
        phx_store_release(store);
        code = 0;
      } catch (const std::exception &) {
      }
      _exit(code);
    }
    pids.push_back(pid);
  }
  for (const pid_t pid : pids) {
    int status = -1;
    waitpid(pid, &status, 0);
    CHECK(status == 0);
  }
}

TEST(a_symmetric_allocation_has_one_mapping_a_rank_and_one_descriptor) {
  constexpr int kRanks = 3, kAllocations = 64;
  with_processes(kRanks, [](int, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    const auto allocate = [&] {
      phx_symm *symm = nullptr;
      CHECK_OK(phx_symm_alloc(group, nullptr, 4096, 0, &symm));
      return symm;
    };
    const Held before = held_at_rest(group);
    std::vector<phx_symm *> symms;
    for (int i = 0; i < kAllocations; ++i) symms.push_back(allocate());
    const Held full = held_at_rest(group);
    if (kCounts) {
      CHECK(full.fds - before.fds <= kAllocations + 1);
      CHECK(full.maps - before.maps <= kRanks * (kAllocations + kAllocations / 16) + 4);
    }
    for (phx_symm *symm : symms) phx_symm_release(symm);
    const Held empty = held_at_rest(group);
    for (int i = 0; i < 200; ++i) phx_symm_release(allocate());  // their pads serve again
    const Held later = held_at_rest(group);
    if (kCounts) {
      CHECK(empty.fds <= before.fds + 1 && later.fds <= empty.fds + 1);
      CHECK(later.maps <= empty.maps + kRanks);
      CHECK(later.heap <= empty.heap + 4096);
    }
    phx_group_release(group);
  });
}

// The ranks free in different orders, and never tell each other; the pad of each is zero whoever had it before. M29 M33
TEST(pads_that_serve_again_are_zero_and_belong_to_one_allocation) {
  constexpr int kRanks = 3, kRounds = 300;
  constexpr size_t kLive = 9;
  with_processes(kRanks, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    std::vector<phx_symm *> live;
    for (int round = 0; round < kRounds; ++round) {
      phx_symm *symm = nullptr;
      CHECK_OK(phx_symm_alloc(group, nullptr, 64, 0, &symm));
      phx_symm_info info{};
      info.struct_size = sizeof info;
      CHECK_OK(phx_symm_get_info(symm, &info));
      const uint32_t *pad = phx_symm_signal_pad(symm, rank);
      // What the peers have put there by now is at most one signal each, on the channel of this round.
      const uint32_t channel = static_cast<uint32_t>(round) % info.signal_channels;
      for (size_t word = 0; word < info.signal_pad_bytes / sizeof *pad; ++word) {
        const bool may_have_come =
            word % info.pad_stride == channel && static_cast<int>(word / info.pad_stride) != rank;
        CHECK(pad[word] == 0 || (may_have_come && pad[word] == 1));
      }
      for (int peer = 0; peer < kRanks; ++peer)
        if (peer != rank) CHECK_OK(phx_symm_put_signal(symm, peer, channel));
      for (int peer = 0; peer < kRanks; ++peer)
        if (peer != rank) CHECK_OK(phx_symm_wait_signal(symm, peer, channel, 0));
      CHECK_OK(phx_symm_barrier(symm, channel, 0));
      live.push_back(symm);
      // Rank 0 frees the newest ones, rank 1 the oldest, and rank 2 some from the middle.
      while (live.size() > kLive) {
        const size_t at = rank == 0 ? live.size() - 1 : rank == 1 ? 0 : live.size() / 2;
        phx_symm_release(live[at]);
        live.erase(live.begin() + static_cast<long>(at));
      }
    }
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    for (phx_symm *symm : live) phx_symm_release(symm);
    phx_group_release(group);
  });
}

TEST(of_recent_numbers_the_last_ones_are_known) {
  phx::RecentIds recent;
  for (uint64_t id = 1; id <= 2 * phx::RecentIds::kCount; ++id) recent.insert(id);
  CHECK(recent.count(phx::RecentIds::kCount) == 0);
  CHECK(recent.count(phx::RecentIds::kCount + 1) == 1 && recent.count(2 * phx::RecentIds::kCount) == 1);
  recent.erase(2 * phx::RecentIds::kCount);
  CHECK(recent.count(2 * phx::RecentIds::kCount) == 0);
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
