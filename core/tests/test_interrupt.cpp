// A thread's own hook ends its waits (phx_set_interrupt), and the other ranks of the group hear of it at once.
#include <atomic>
#include <cstring>

#include "check.h"
#include "ranks.h"

namespace {

struct Hook {
  std::atomic<int> answer{0};
  std::atomic<int> calls{0};
};

int ask(void *arg) {
  Hook *hook = static_cast<Hook *>(arg);
  ++hook->calls;
  return hook->answer.load();
}

bool says(const char *part) {
  if (std::strstr(phx_last_error(), part) != nullptr) return true;
  std::printf("the last error says: %s\n", phx_last_error());
  return false;
}

int32_t members_of(phx_group *group) {
  phx_group_info info{};
  info.struct_size = sizeof info;
  CHECK_OK(phx_group_get_info(group, &info));
  return info.group_size;
}

// Rank 1 waits in `wait` and is interrupted; rank 0 comes later, does the same, and hears why it cannot.
template <class Wait>
void interrupt_in(const Wait &wait) {
  std::atomic<bool> over{false};
  const auto body = [&](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    if (rank == 1) {
      Hook hook;
      hook.answer = 1;
      CHECK_OK(phx_set_interrupt(ask, &hook));
      CHECK(wait(group, rank) == PHX_ERR_INTERRUPTED);
      CHECK(says("rank 1 (pid ") && says("was interrupted while it waited"));
      CHECK(hook.calls > 0);
      CHECK_OK(phx_set_interrupt(nullptr, nullptr));
      CHECK(wait(group, rank) == PHX_ERR_REVOKED);
      over = true;
    } else {
      while (!over) std::this_thread::yield();
      phx_status status = PHX_OK;  // of what rank 1 had sent, until this rank hears of the interruption
      while (status == PHX_OK) status = wait(group, rank);
      CHECK(status == PHX_ERR_REVOKED);
      CHECK(says("rank 1 (pid ") && says("was interrupted"));
    }
    phx_group *next = nullptr;
    CHECK_OK(phx_group_shrink(group, "next", 0, &next));
    CHECK(next != nullptr && members_of(next) == 2);
    float one = 1, sum = 0;
    CHECK_OK(phx_all_reduce(next, &one, &sum, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
    CHECK(sum == 2);
    phx_group_release(next);
    phx_group_release(group);
  };
  ranks::as_threads(2, body);
}

phx_status all_reduce(phx_group *group, int) {
  float one = 1, sum = 0;
  return phx_all_reduce(group, &one, &sum, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr);
}

phx_status started(phx_group *group, int) {
  float one = 1, sum = 0;
  phx_work *work = nullptr;
  phx_status status = phx_all_reduce(group, &one, &sum, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, &work);
  if (status != PHX_OK) return status;
  status = phx_work_wait(work, 0);
  if (status != PHX_OK) CHECK(phx_work_test(work) == status);
  phx_work_release(work);
  return status;
}

phx_status receive(phx_group *group, int rank) {
  float value = 0;
  return phx_recv(group, &value, 1, PHX_DTYPE_F32, 1 - rank, 7, nullptr, nullptr);
}

phx_status allocate(phx_group *group, int) {
  phx_symm *symm = nullptr;
  const phx_status status = phx_symm_alloc(group, nullptr, 4096, 0, &symm);
  if (status == PHX_OK) phx_symm_release(symm);
  return status;
}

TEST(a_collective_is_interrupted) { interrupt_in(all_reduce); }
TEST(the_wait_for_a_started_collective_is_interrupted) { interrupt_in(started); }
TEST(a_receive_is_interrupted) { interrupt_in(receive); }
TEST(a_symmetric_allocation_is_interrupted) { interrupt_in(allocate); }
TEST(a_split_is_interrupted) {
  interrupt_in([](phx_group *group, int) {
    phx_group *part = nullptr;
    const phx_status status = phx_group_split(group, 0, 0, "part", 0, &part);
    if (status == PHX_OK) phx_group_release(part);
    return status;
  });
}

TEST(a_barrier_and_a_signal_of_symmetric_memory_are_interrupted) {
  for (const bool signal : {false, true}) {
    std::atomic<bool> over{false};
    ranks::as_threads(2, [&](int rank, phx_world *world) {
      phx_group *group = ranks::make_group(world);
      phx_symm *symm = nullptr;
      CHECK_OK(phx_symm_alloc(group, nullptr, 4096, 0, &symm));
      const auto wait = [&] {
        return signal ? phx_symm_wait_signal(symm, 1 - rank, 0, 0) : phx_symm_barrier(symm, 0, 0);
      };
      if (rank == 1) {
        Hook hook;
        hook.answer = 1;
        CHECK_OK(phx_set_interrupt(ask, &hook));
        CHECK(wait() == PHX_ERR_INTERRUPTED && says("rank 1 (pid "));
        CHECK_OK(phx_set_interrupt(nullptr, nullptr));
        over = true;
      } else {
        while (!over) std::this_thread::yield();
        phx_status status = PHX_OK;
        while (status == PHX_OK) status = wait();
        CHECK(status == PHX_ERR_REVOKED && says("was interrupted"));
      }
      phx_symm_release(symm);
      phx_group_release(group);
    });
  }
}

TEST(a_rank_that_is_interrupted_while_the_survivors_agree_counts_as_absent) {
  std::atomic<bool> over{false};
  ranks::as_threads(3, [&](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    phx_group *next = nullptr;
    if (rank == 2) {
      Hook hook;
      hook.answer = 1;
      CHECK_OK(phx_set_interrupt(ask, &hook));
      CHECK(phx_group_shrink(group, "next", 0, &next) == PHX_ERR_INTERRUPTED);
      CHECK_OK(phx_set_interrupt(nullptr, nullptr));
      over = true;
    } else {
      while (!over) std::this_thread::yield();
      CHECK_OK(phx_group_shrink(group, "next", 0, &next));
      CHECK(members_of(next) == 2);
      phx_group_release(next);
    }
    phx_group_release(group);
  });
}

TEST(a_group_is_not_made_when_a_rank_is_interrupted_before_the_others_come) {
  std::atomic<bool> over{false}, heard{false};
  ranks::as_threads(2, [&](int rank, phx_world *world) {
    const int32_t all[] = {0, 1};
    phx_group *group = nullptr;
    if (rank == 1) {
      Hook hook;
      hook.answer = 1;
      CHECK_OK(phx_set_interrupt(ask, &hook));
      CHECK(phx_group_create(world, "g", all, 2, 0, &group) == PHX_ERR_INTERRUPTED);
      CHECK_OK(phx_set_interrupt(nullptr, nullptr));
      over = true;
      while (!heard) std::this_thread::yield();  // the attempt of a rank that has left would be one of an earlier run
    } else {
      while (!over) std::this_thread::yield();
      const phx_status status = phx_group_create(world, "g", all, 2, 0, &group);
      heard = true;
      CHECK(status == PHX_ERR_REVOKED && says("was interrupted"));
    }
  });
}

// What a hook of a waiting thread may do, and what not.
struct Busy {
  phx_group *group = nullptr;
  phx_store *store = nullptr;
  int calls = 0;
  phx_status collective = PHX_OK;
  phx_status set = PHX_OK;
};

int use_the_group(void *arg) {
  Busy *busy = static_cast<Busy *>(arg);
  float one = 1, sum = 0;
  busy->collective = phx_all_reduce(busy->group, &one, &sum, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr);
  busy->set = phx_store_set(busy->store, "key", "value", 5);
  return ++busy->calls >= 3 ? 1 : 0;
}

TEST(a_hook_is_refused_what_waits_on_a_group_and_is_asked_again_until_it_says_yes) {
  phx_store *store = nullptr;
  CHECK_OK(phx_store_memory(&store));
  std::atomic<bool> over{false};
  ranks::as_threads(2, [&](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    if (rank == 1) {
      Busy busy{group, store};
      CHECK_OK(phx_set_interrupt(use_the_group, &busy));
      float one = 1, sum = 0;
      CHECK(phx_all_reduce(group, &one, &sum, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr) == PHX_ERR_INTERRUPTED);
      CHECK(busy.calls >= 3 && busy.collective == PHX_ERR_UNSUPPORTED && busy.set == PHX_OK);
      CHECK_OK(phx_set_interrupt(nullptr, nullptr));
      over = true;
    }
    while (!over) std::this_thread::yield();
    phx_group_release(group);
  });
  phx_store_release(store);
}

TEST(waits_of_stores_are_interrupted) {
  ranks::FileStore file;
  phx_store *stores[3] = {};
  CHECK_OK(phx_store_memory(&stores[0]));
  CHECK_OK(phx_store_file(file.path().c_str(), &stores[1]));
  uint16_t port = 0;
  phx_store *served = nullptr;
  CHECK_OK(phx_store_tcp_serve("127.0.0.1", "token", 5, &port, &served));
  CHECK_OK(phx_store_tcp_connect("127.0.0.1", port, "token", 5, 5000, &stores[2]));
  Hook hook;
  hook.answer = 1;
  CHECK_OK(phx_set_interrupt(ask, &hook));
  const char *key = "never set";
  for (phx_store *store : stores) {
    size_t size = 0;
    CHECK(phx_store_get(store, key, nullptr, 0, &size, 60000) == PHX_ERR_INTERRUPTED && says("store_get"));
    CHECK(phx_store_wait(store, &key, 1, 60000) == PHX_ERR_INTERRUPTED);
  }
  phx_store *nobody = nullptr;
  phx_store_release(served);
  CHECK(phx_store_tcp_connect("127.0.0.1", port, "token", 5, 60000, &nobody) == PHX_ERR_INTERRUPTED);
  CHECK_OK(phx_set_interrupt(nullptr, nullptr));
  for (phx_store *store : stores) phx_store_release(store);
}

TEST(a_hook_belongs_to_one_thread_and_is_asked_only_while_that_thread_waits) {
  Hook hook;
  hook.answer = 1;
  CHECK_OK(phx_set_interrupt(ask, &hook));
  phx_store *store = nullptr;
  CHECK_OK(phx_store_memory(&store));
  CHECK_OK(phx_store_set(store, "key", "value", 5));
  size_t size = 0;
  CHECK_OK(phx_store_get(store, "key", nullptr, 0, &size, 1000));
  std::thread other([&] {
    size_t length = 0;
    CHECK(phx_store_get(store, "never set", nullptr, 0, &length, 300) == PHX_ERR_TIMEOUT);
  });
  other.join();
  CHECK(hook.calls == 0);
  CHECK_OK(phx_set_interrupt(nullptr, nullptr));
  phx_store_release(store);
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
