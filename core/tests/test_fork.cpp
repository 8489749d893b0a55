// What a forked child may do with what its parent made: look at it, and nothing else.  C1
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "base/fork.h"
#include "pipe.h"
#include "ranks.h"
#include "world/world.h"

namespace {

// Runs `body` in a forked child and returns its wait status. A child that hangs is ended by SIGALRM.
template <class Body>
int in_child(Body body) {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    signal(SIGALRM, SIG_DFL);
    alarm(20);
    int code = 1;
    try {
      body();
      code = 0;
    } catch (const std::exception &) {
    }
    _exit(code);
  }
  int status = -1;
  waitpid(pid, &status, 0);
  return status;
}

// The call is refused because of the fork.
void refused(phx_status status, int line) {
  if (status == PHX_ERR_UNSUPPORTED && std::strstr(phx_last_error(), "is a fork of it") != nullptr) return;
  check::failed(__FILE__, line, std::string("not refused: ") + phx_status_name(status) + ", " + phx_last_error());
}
#define REFUSED(call) refused(call, __LINE__)

struct Rank {
  phx_world *world = nullptr;
  phx_group *group = nullptr;
  phx_symm *symm = nullptr;
  phx_window *window = nullptr;
  void *block = nullptr;
  phx_work *work = nullptr;  // pending
  float pending = 0;
};

void refuse_collectives(Rank &rank) {
  float in[8] = {100, 100, 100, 100, 100, 100, 100, 100}, out[8] = {};
  const size_t counts[2] = {1, 1};
  phx_group *group = rank.group;
  phx_work *work = nullptr;
  for (phx_work **started : {static_cast<phx_work **>(nullptr), &work}) {
    REFUSED(phx_all_reduce(group, in, out, 4, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, started));
    REFUSED(phx_all_gather(group, in, out, 4, PHX_DTYPE_F32, nullptr, started));
    REFUSED(phx_all_gather_v(group, in, out, counts, PHX_DTYPE_F32, nullptr, started));
    REFUSED(phx_reduce_scatter(group, in, out, 4, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, started));
    REFUSED(phx_reduce_scatter_v(group, in, out, counts, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, started));
    REFUSED(phx_all_to_all(group, in, out, 4, PHX_DTYPE_F32, nullptr, started));
    REFUSED(phx_all_to_all_v(group, in, counts, out, counts, PHX_DTYPE_F32, nullptr, started));
    REFUSED(phx_broadcast(group, in, 4, PHX_DTYPE_F32, 0, nullptr, started));
    REFUSED(phx_reduce(group, in, out, 4, PHX_DTYPE_F32, PHX_OP_SUM, 0, nullptr, started));
    REFUSED(phx_gather(group, in, out, 4, PHX_DTYPE_F32, 0, nullptr, started));
    REFUSED(phx_scatter(group, in, out, 4, PHX_DTYPE_F32, 0, nullptr, started));
    REFUSED(phx_send(group, in, 4, PHX_DTYPE_F32, 1, 0, nullptr, started));
    REFUSED(phx_recv(group, out, 4, PHX_DTYPE_F32, 1, 0, nullptr, started));
    phx_symm *symm = rank.symm;
    REFUSED(phx_symm_all_reduce(symm, 0, out, 4, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, started));
    REFUSED(phx_symm_all_gather(symm, 0, out, 4, PHX_DTYPE_F32, nullptr, started));
    REFUSED(phx_symm_all_gather_v(symm, 0, out, counts, PHX_DTYPE_F32, nullptr, started));
    REFUSED(phx_symm_reduce_scatter(symm, 0, out, 4, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, started));
    REFUSED(phx_symm_reduce_scatter_v(symm, 0, out, counts, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, started));
    REFUSED(phx_symm_all_to_all(symm, 0, out, 4, PHX_DTYPE_F32, nullptr, started));
    REFUSED(phx_symm_all_to_all_v(symm, 0, counts, out, counts, PHX_DTYPE_F32, nullptr, started));
    REFUSED(phx_symm_broadcast(symm, 0, 4, PHX_DTYPE_F32, 0, nullptr, started));
    REFUSED(phx_symm_reduce(symm, 0, out, 4, PHX_DTYPE_F32, PHX_OP_SUM, 0, nullptr, started));
    REFUSED(phx_symm_gather(symm, 0, out, 4, PHX_DTYPE_F32, 0, nullptr, started));
    REFUSED(phx_symm_scatter(symm, 0, out, 4, PHX_DTYPE_F32, 0, nullptr, started));
    phx_call call{};
    call.struct_size = sizeof call;
    call.kind = PHX_CALL_ALL_REDUCE;
    call.in = in;
    call.out = out;
    call.count = 4;
    call.dtype = PHX_DTYPE_F32;
    call.op = PHX_OP_SUM;
    REFUSED(phx_coalesced(group, &call, 1, nullptr, started));
  }
  phx_message message{};
  message.struct_size = sizeof message;
  message.kind = PHX_MESSAGE_SEND;
  message.buffer = in;
  message.count = 4;
  message.dtype = PHX_DTYPE_F32;
  message.peer_group_rank = 1;
  REFUSED(phx_messages(group, &message, 1, nullptr));
  REFUSED(phx_barrier(group, nullptr, nullptr));
}

void refuse_the_rest(Rank &rank) {
  phx_group *group = rank.group, *made = nullptr;
  const int32_t members[2] = {0, 1};
  REFUSED(phx_group_create(rank.world, "other", members, 2, 0, &made));
  REFUSED(phx_group_attach(rank.world, "other", 0, 1, nullptr, 0, &made));
  REFUSED(phx_group_split(group, 0, 0, nullptr, 0, &made));
  REFUSED(phx_group_shrink(group, nullptr, 0, &made));
  uint64_t bits = 1;
  REFUSED(phx_group_agree(group, &bits, nullptr, 0));
  REFUSED(phx_group_revoke(group, "a child's reason"));
  phx_group_info group_info{};
  group_info.struct_size = sizeof group_info;
  REFUSED(phx_group_get_info(group, &group_info));
  phx_error_info error{};
  error.struct_size = sizeof error;
  REFUSED(phx_group_get_error(group, &error));
  REFUSED(phx_group_refuse(group, 0, "a child's reason"));
  REFUSED(phx_group_set_timeout(group, 1));
  CHECK(phx_group_rank(group) == -1);
  CHECK(phx_group_size(group) == -1);
  phx_group_stats stats{};
  stats.struct_size = sizeof stats;
  REFUSED(phx_group_get_stats(group, &stats));
  phx_tuning tuning{};
  tuning.struct_size = sizeof tuning;
  REFUSED(phx_group_get_tuning(group, &tuning));
  REFUSED(phx_group_set_tuning(group, &tuning, 0));
  REFUSED(phx_group_save_tuning(group, "/nowhere"));
  phx_gpu_tuning gpu_tuning{};
  gpu_tuning.struct_size = sizeof gpu_tuning;
  REFUSED(phx_group_get_gpu_tuning(group, &gpu_tuning));
  REFUSED(phx_group_set_gpu_tuning(group, &gpu_tuning, 0));
  REFUSED(phx_group_save_gpu_tuning(group, "/nowhere"));

  REFUSED(phx_world_check(rank.world));
  REFUSED(phx_world_check_peer(rank.world, 1));
  CHECK(phx_world_rank(rank.world) == -1);
  CHECK(phx_world_size(rank.world) == -1);
  CHECK(phx_world_host_id(rank.world) == 0);
  REFUSED(phx_world_abort(rank.world, "a child's reason"));
  REFUSED(phx_world_set_timeout(rank.world, 1));
  size_t size = 0, blocks = 0;
  REFUSED(phx_world_dump(rank.world, nullptr, 0, &size));

  void *memory = nullptr;
  phx_mem_info memory_info{};
  memory_info.struct_size = sizeof memory_info;
  REFUSED(phx_mem_alloc(rank.world, nullptr, 64, &memory));
  REFUSED(phx_mem_alloc_persistent(rank.world, nullptr, 64, "", 1, &memory));
  REFUSED(phx_mem_retain(rank.world, rank.block));
  REFUSED(phx_mem_free(rank.world, rank.block));
  REFUSED(phx_mem_drop(rank.world, nullptr, "", 1));
  REFUSED(phx_mem_find(rank.world, rank.block, &memory_info));
  REFUSED(phx_mem_count(rank.world, &blocks, &size));
  char handle[PHX_FABRIC_HANDLE_BYTES] = {};
  const phx_device gpu{PHX_DEVICE_CUDA, 0};
  REFUSED(phx_mem_export_fabric(rank.world, rank.block, handle));
  REFUSED(phx_mem_import_fabric(rank.world, &gpu, handle, sizeof handle, &memory));
  REFUSED(phx_allocator_register(rank.world, PHX_DEVICE_CPU, nullptr, nullptr));
  REFUSED(phx_allocator_unregister(rank.world, PHX_DEVICE_CPU));

  phx_symm *symm = nullptr;
  REFUSED(phx_symm_alloc(group, nullptr, 64, 0, &symm));
  REFUSED(phx_symm_rendezvous(group, rank.block, 0, &symm));
  REFUSED(phx_symm_find(group, rank.block, &symm));
  CHECK(phx_symm_covers(group, rank.block, 8) == 0);
  CHECK(phx_symm_buffer(rank.symm, 1) == nullptr);
  CHECK(phx_symm_signal_pad(rank.symm, 1) == nullptr);
  phx_symm_info symm_info{};
  symm_info.struct_size = sizeof symm_info;
  REFUSED(phx_symm_get_info(rank.symm, &symm_info));
  phx_team team{};
  team.struct_size = sizeof team;
  REFUSED(phx_symm_get_team(rank.symm, &team));
  REFUSED(phx_symm_map_gathered(rank.symm, 0, 4096, &memory));
  REFUSED(phx_symm_unmap_gathered(rank.symm, rank.block));
  REFUSED(phx_symm_put_signal(rank.symm, 1, 0));
  REFUSED(phx_symm_wait_signal(rank.symm, 1, 0, 0));
  REFUSED(phx_symm_barrier(rank.symm, 0, 0));
  REFUSED(phx_symm_enqueue_put_signal(rank.symm, 1, 0, nullptr));
  REFUSED(phx_symm_enqueue_wait_signal(rank.symm, 1, 0, 0, nullptr));
  REFUSED(phx_symm_enqueue_barrier(rank.symm, 0, 0, nullptr));

  phx_window *window = nullptr;
  uint32_t come = 0;
  REFUSED(phx_window_create(group, nullptr, rank.block, 8, 0, &window));
  REFUSED(phx_window_put(rank.window, 1, 0, &size, 4, 1, 0));
  REFUSED(phx_window_get(rank.window, 1, 0, &size, 4, 0));
  REFUSED(phx_window_wait_signal(rank.window, 1, 0));
  REFUSED(phx_window_get_signals(rank.window, 1, &come));
  REFUSED(phx_window_flush(rank.window, 0));
  CHECK(phx_window_memory(rank.window, 1) == nullptr);

  REFUSED(phx_work_test(rank.work));
  REFUSED(phx_work_wait(rank.work, 0));
  size_t index = 0;
  REFUSED(phx_work_wait_any(&rank.work, 1, 0, &index));
  REFUSED(phx_work_expire(rank.work, 1));
  REFUSED(phx_work_get_error(rank.work, &error));
  int32_t source = 0;
  REFUSED(phx_work_get_source(rank.work, &source));
}

void release_all(Rank &rank) {
  phx_work_release(phx_work_retain(rank.work));
  phx_work_release(rank.work);
  phx_symm_release(phx_symm_retain(rank.symm));
  phx_symm_release(rank.symm);
  phx_window_release(rank.window);
  phx_group_release(phx_group_retain(rank.group));
  phx_group_release(rank.group);
  CHECK_OK(phx_world_finalize(rank.world));
  phx_world_release(rank.world);
}

TEST(every_use_in_a_forked_child_is_refused_and_the_ranks_get_their_own_numbers) {
  Pipe refused_all;  // rank 1 comes to the pending all_reduce when the child is through
  ranks::all_zero(ranks::as_processes(2, [&](int self, phx_world *world) {
    Rank rank;
    rank.world = world;
    rank.group = ranks::make_group(world);
    CHECK_OK(phx_symm_alloc(rank.group, nullptr, 4096, 0, &rank.symm));
    rank.block = phx_symm_buffer(rank.symm, self);
    void *base = nullptr;
    CHECK_OK(phx_mem_alloc(world, nullptr, 64, &base));
    CHECK_OK(phx_window_create(rank.group, nullptr, base, 64, 0, &rank.window));
    if (self == 1) refused_all.receive<int>();
    const float mine = static_cast<float>(self + 1);
    CHECK_OK(phx_all_reduce(rank.group, &mine, &rank.pending, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, &rank.work));
    if (self == 0) {
      CHECK(in_child([&] { refuse_collectives(rank); }) == 0);
      CHECK(in_child([&] { refuse_the_rest(rank); }) == 0);
      CHECK(in_child([&] { release_all(rank); }) == 0);
      refused_all.send(1);
    }
    CHECK_OK(phx_work_wait(rank.work, 0));
    CHECK(rank.pending == 3);
    for (int i = 0; i < 4; ++i) {
      const float in = static_cast<float>(i * (self + 1));
      float out = 0;
      CHECK_OK(phx_all_reduce(rank.group, &in, &out, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
      CHECK(out == static_cast<float>(3 * i));
    }
    CHECK_OK(phx_symm_barrier(rank.symm, 0, 0));
    phx_work_release(rank.work);
    phx_window_release(rank.window);
    CHECK_OK(phx_mem_free(world, base));
    phx_symm_release(rank.symm);
    phx_group_release(rank.group);
  }));
}

TEST(a_child_releases_what_it_inherited_whatever_threads_of_its_parent_were_doing) {
  ranks::all_zero(ranks::as_processes(2, [&](int self, phx_world *world) {
    Rank rank;
    rank.world = world;
    rank.group = ranks::make_group(world);
    CHECK_OK(phx_symm_alloc(rank.group, nullptr, 4096, 0, &rank.symm));
    phx_group *busy = ranks::make_group(world, "busy");
    std::atomic<bool> done{false};
    std::thread agreeing([&] {  // holds locks of the group and of the monitor most of the time
      for (uint64_t go_on = 1; go_on != 0;) {
        go_on = 1;
        if (self == 0 && done.load()) go_on = 0;
        if (phx_group_agree(busy, &go_on, nullptr, 0) != PHX_OK) break;
      }
    });
    for (int i = 0; self == 0 && i < 60; ++i) {
      const int status = in_child([&] {
        release_all(rank);
        phx_group_release(busy);
      });
      CHECK(status == 0);
    }
    done.store(true);
    agreeing.join();
    CHECK_OK(phx_barrier(rank.group, nullptr, nullptr));
    phx_symm_release(rank.symm);
    phx_group_release(busy);
    phx_group_release(rank.group);
  }));
}

TEST(children_of_one_process_make_worlds_and_groups_of_their_own) {
  ranks::FileStore file;
  phx_store *store = nullptr;  // of the parent: its children may use it
  CHECK_OK(phx_store_file(file.path().c_str(), &store));
  ranks::as_threads(1, [&](int, phx_world *world) {
    phx_group *parents = ranks::make_group(world);
    std::vector<pid_t> pids;
    for (int self = 0; self < 2; ++self) {
      const pid_t pid = fork();
      CHECK(pid >= 0);
      if (pid != 0) {
        pids.push_back(pid);
        continue;
      }
      alarm(60);
      int code = 1;
      try {
        phx_world *own = ranks::make_world(self, 2, store);
        phx_group *group = ranks::make_group(own);
        const float in = static_cast<float>(self + 1);
        float out = 0;
        CHECK_OK(phx_all_reduce(group, &in, &out, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
        CHECK(out == 3);
        REFUSED(phx_barrier(parents, nullptr, nullptr));
        // A grandchild has neither.
        CHECK(in_child([&] { REFUSED(phx_barrier(group, nullptr, nullptr)); }) == 0);
        CHECK_OK(phx_barrier(group, nullptr, nullptr));
        phx_group_release(group);
        phx_world_release(own);
        code = 0;
      } catch (const std::exception &) {
      }
      _exit(code);
    }
    for (const pid_t pid : pids) {
      int status = -1;
      CHECK(waitpid(pid, &status, 0) == pid);
      CHECK(status == 0);
    }
    CHECK_OK(phx_barrier(parents, nullptr, nullptr));
    phx_group_release(parents);
  });
  phx_store_release(store);
}

TEST(a_rank_that_ended_is_gone_though_its_forked_child_lives) {
  Pipe records, child;
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    phx_world *world = ranks::make_world(0, 1, nullptr);
    const phx::PeerRecord record = world->ptr->record();
    if (fork() == 0) {
      child.send(getpid());  // from the child: by now it has let go of the parent's socket
      for (;;) pause();
    }
    records.send(record);
    for (;;) pause();
  }
  const auto record = records.receive<phx::PeerRecord>();
  const auto grandchild = child.receive<pid_t>();
  CHECK(!phx::has_left(record));
  kill(pid, SIGKILL);
  CHECK(waitpid(pid, nullptr, 0) == pid);
  const bool left = phx::has_left(record);
  kill(grandchild, SIGKILL);
  CHECK(left);
}

TEST(a_memory_store_says_in_a_forked_child_that_it_cannot_work_there) {
  phx_store *store = nullptr;
  CHECK_OK(phx_store_memory(&store));
  CHECK_OK(phx_store_set(store, "key", "value", 5));
  const int status = in_child([&] {
    size_t size = 0;
    int64_t sum = 0;
    const char *key = "key";
    CHECK(phx_store_get(store, key, nullptr, 0, &size, 100) == PHX_ERR_UNSUPPORTED);
    CHECK(phx_store_set(store, key, "other", 5) == PHX_ERR_UNSUPPORTED);
    CHECK(phx_store_wait(store, &key, 1, 100) == PHX_ERR_UNSUPPORTED);
    CHECK(phx_store_add(store, "sum", 1, &sum) == PHX_ERR_UNSUPPORTED);
    CHECK(phx_store_remove(store, key) == PHX_ERR_UNSUPPORTED);
    CHECK(std::strstr(phx_last_error(), "forked") != nullptr);
    phx_store_release(store);
  });
  CHECK(status == 0);
  phx_store_release(store);
}

template <class Mutex>
void fork_while_held() {
  static phx::AcrossForks<Mutex> mutex;
  std::atomic<bool> stop{false};
  std::thread holder([&] {
    while (!stop.load()) {
      const std::lock_guard<Mutex> lock(mutex);
      for (volatile int i = 0; i < 1000;) i = i + 1;
    }
  });
  int bad = 0;
  for (int i = 0; i < 50; ++i)
    bad += in_child([] {
             for (int turn = 0; turn < 2; ++turn) const std::lock_guard<Mutex> lock(mutex);
           }) != 0;
  stop.store(true);
  holder.join();
  CHECK(bad == 0);
  const std::lock_guard<Mutex> lock(mutex);  // in the parent, too
}

TEST(a_mutex_across_forks_is_free_in_the_child_whoever_held_it) {
  fork_while_held<std::mutex>();
  fork_while_held<std::shared_mutex>();
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
