// What goes wrong is named on every rank, within bounded time, and leaves nothing hanging.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstring>
#include <set>
#include <vector>

#include "ranks.h"
#include "world/identity.h"
#include "world/link.h"

namespace {

phx_error_info last_info() {
  phx_error_info info{};
  info.struct_size = sizeof info;
  CHECK_OK(phx_last_error_info(&info));
  return info;
}

TEST(wrong_arguments_fail_before_anything_is_sent) {
  ranks::as_threads(2, [](int, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    phx_group *none = nullptr;
    float a[8] = {}, b[8] = {};
    CHECK_FAILS(PHX_ERR_INVALID, "is NULL",
                phx_all_reduce(nullptr, a, b, 8, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "is NULL",
                phx_all_reduce(group, nullptr, b, 8, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "unknown dtype", phx_all_reduce(group, a, b, 8, 99, PHX_OP_SUM, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "unknown reduce op 42; expected PHX_OP_SUM",
                phx_all_reduce(group, a, b, 8, PHX_DTYPE_F32, 42, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "band is not defined for dtype float32",
                phx_all_reduce(group, a, b, 8, PHX_DTYPE_F32, PHX_OP_BAND, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "overlap",
                phx_all_reduce(group, a, a + 1, 4, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "more than memory",
                phx_all_reduce(group, a, b, SIZE_MAX / 2, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "more than memory",
                phx_reduce_scatter(group, a, b, SIZE_MAX / 2 + 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "root is 2, which is not a group rank: the group has 2 ranks",
                phx_broadcast(group, a, 8, PHX_DTYPE_F32, 2, nullptr, nullptr));
    phx_options options{};
    options.struct_size = sizeof options;
    options.timeout_ms = -5;
    CHECK_FAILS(PHX_ERR_INVALID, "timeout_ms is -5",
                phx_all_reduce(group, a, b, 8, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
    options.struct_size = 3;
    CHECK_FAILS(PHX_ERR_ABI, "struct_size",
                phx_all_reduce(group, a, b, 8, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
    const int32_t twice[] = {0, 1, 0}, strange[] = {0, 7}, alone[] = {1 - phx_world_rank(world)};
    CHECK_FAILS(PHX_ERR_INVALID, "rank 0 is listed twice", phx_group_create(world, "g", twice, 3, 0, &none));
    CHECK_FAILS(PHX_ERR_INVALID, "rank 7 does not exist", phx_group_create(world, "g", strange, 2, 0, &none));
    CHECK_FAILS(PHX_ERR_INVALID, "is not in the list of ranks", phx_group_create(world, "g", alone, 1, 0, &none));
    CHECK_FAILS(PHX_ERR_INVALID, "needs a name", phx_group_create(world, "", alone, 1, 0, &none));
    CHECK_FAILS(PHX_ERR_INVALID, "it needs at least 1", phx_group_create(world, "g", alone, 0, 0, &none));
    CHECK(none == nullptr);
    CHECK_OK(phx_world_check(world));
    a[0] = 1;  // the group has not noticed any of it
    CHECK_OK(phx_all_reduce(group, a, b, 8, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
    CHECK(b[0] == 2);
    phx_group_release(group);
  });
}

TEST(ranks_that_call_different_collectives_are_told_both_calls) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    float a[64] = {}, b[256] = {};
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    const phx_status status = rank == 1 ? phx_all_gather(group, a, b, 32, PHX_DTYPE_F32, nullptr, nullptr)
                                        : phx_all_reduce(group, a, b, 64, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr);
    CHECK(status == PHX_ERR_MISMATCH);
    CHECK(std::strstr(phx_last_error(), "all_gather(float32, 32)") != nullptr);
    CHECK(std::strstr(phx_last_error(), "all_reduce(float32, 64, sum)") != nullptr);
    CHECK_FAILS(PHX_ERR_REVOKED, "revoked by an earlier failure", phx_barrier(group, nullptr, nullptr));
    phx_group_info info{};
    info.struct_size = sizeof info;
    CHECK_OK(phx_group_get_info(group, &info));
    CHECK(info.state == PHX_GROUP_FAILED);
    phx_error_info cause{};
    cause.struct_size = sizeof cause;
    CHECK_OK(phx_group_get_error(group, &cause));
    CHECK(cause.status == PHX_ERR_MISMATCH);
    phx_group *fresh = ranks::make_group(world);  // of the same name
    CHECK_OK(phx_barrier(fresh, nullptr, nullptr));
    phx_group_release(fresh);
    phx_group_release(group);
  });
}

TEST(ranks_that_meet_for_different_reasons_are_told_both_calls) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world), *half = nullptr;
    const phx_device cpu{PHX_DEVICE_CPU, 0};
    void *block = nullptr;
    phx_symm *symm = nullptr;
    CHECK_OK(phx_mem_alloc(world, &cpu, 4096, &block));
    const phx_status status =
        rank == 1 ? phx_group_split(group, 0, 0, "half", 0, &half) : phx_symm_rendezvous(group, block, 0, &symm);
    CHECK(status == PHX_ERR_MISMATCH);
    CHECK(std::strstr(phx_last_error(), "group_split") != nullptr);
    CHECK(std::strstr(phx_last_error(), "symm_rendezvous") != nullptr);
    CHECK_FAILS(PHX_ERR_REVOKED, "revoked by an earlier failure", phx_barrier(group, nullptr, nullptr));
    CHECK_OK(phx_mem_free(world, block));
    phx_group_release(group);
  });
}

TEST(counts_that_do_not_fit_in_all_to_all_v_fail_alike_and_leave_the_group_usable) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    int32_t in[16] = {}, out[16] = {};
    const size_t ins[2] = {2, 3}, outs[2] = {2, rank == 0 ? size_t{4} : size_t{3}};
    CHECK_FAILS(PHX_ERR_MISMATCH, "all_to_all_v",
                phx_all_to_all_v(group, in, ins, out, outs, PHX_DTYPE_I32, nullptr, nullptr));
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    phx_group_release(group);
  });
}

TEST(a_peer_that_never_comes_is_named_at_the_deadline) {
  ranks::Options options;
  options.timeout_ms = 300;
  ranks::as_threads(
      2,
      [](int rank, phx_world *world) {
        phx_group *none = nullptr;
        const int32_t both[] = {0, 1};
        if (rank == 0) {
          CHECK_FAILS(PHX_ERR_TIMEOUT, "waits for rank 1, which has not made the same call",
                      phx_group_create(world, "lonely", both, 2, 0, &none));
          CHECK(last_info().peer == 1);
        }
        phx_group *group = nullptr;
        CHECK_OK(phx_group_create(world, "pair", both, 2, 20000, &group));
        CHECK_OK(barrier_within(group, 20000));
        float x = 1;
        if (rank == 0) {
          CHECK_FAILS(PHX_ERR_TIMEOUT, "all_reduce #2 on group 'pair'",
                      phx_all_reduce(group, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
          CHECK(std::strstr(phx_last_error(), "rank 1 (pid") != nullptr);
        } else {
          while (phx_world_check(world) == PHX_OK) std::this_thread::yield();  // told by rank 0
          CHECK_FAILS(PHX_ERR_TIMEOUT, "still waits for rank 1",
                      phx_all_reduce(group, &x, &x, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
        }
        phx_group_release(group);
      },
      options);
}

TEST(a_rank_that_comes_too_late_is_told_at_once_and_the_next_try_of_all_makes_the_group) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    static std::atomic<bool> timed_out{false};
    const int32_t both[] = {0, 1};
    phx_group *group = nullptr;
    if (rank == 0) {
      CHECK_FAILS(PHX_ERR_TIMEOUT, "waits for rank 1, which has not made the same call",
                  phx_group_create(world, "late", both, 2, 50, &group));
      timed_out = true;
    } else {
      while (!timed_out) std::this_thread::yield();
      CHECK_FAILS(PHX_ERR_TIMEOUT, "rank 0 (pid", phx_group_create(world, "late", both, 2, 0, &group));
      CHECK(std::strstr(phx_last_error(), "gave up: group_create 'late': timed out after 50 ms") != nullptr);
    }
    CHECK_OK(phx_group_create(world, "late", both, 2, 0, &group));
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    phx_group_release(group);
  });
}

TEST(a_killed_rank_is_named_with_its_pid_by_every_survivor) {
  const std::vector<int> codes = ranks::as_processes(4, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    std::vector<float> data(1 << 16, 1.0f);
    std::vector<int32_t> pids(4);
    int32_t pid = getpid();
    CHECK_OK(phx_all_gather(group, &pid, pids.data(), 1, PHX_DTYPE_I32, nullptr, nullptr));
    for (int i = 0;; ++i) {
      if (rank == 2 && i == 20) raise(SIGKILL);
      const phx_status status =
          phx_all_reduce(group, data.data(), data.data(), data.size(), PHX_DTYPE_F32, PHX_OP_MAX, nullptr, nullptr);
      if (status == PHX_OK) continue;
      CHECK(status == PHX_ERR_PEER_DEAD);
      const std::string expected = "rank 2 (pid " + std::to_string(pids[2]) + ") died";
      CHECK(std::strstr(phx_last_error(), expected.c_str()) != nullptr);
      CHECK(last_info().peer == 2 && last_info().sequence > 0);
      break;
    }
    CHECK_FAILS(PHX_ERR_REVOKED, "died", phx_barrier(group, nullptr, nullptr));
    phx_group_release(group);
  });
  for (int rank = 0; rank < 4; ++rank)
    CHECK(rank == 2 ? WIFSIGNALED(codes[rank]) && WTERMSIG(codes[rank]) == SIGKILL : codes[rank] == 0);
}

TEST(survivors_learn_of_a_death_while_they_wait_for_somebody_else) {
  const std::vector<int> codes = ranks::as_processes(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    if (rank == 2) raise(SIGKILL);
    if (rank == 1)
      while (phx_world_check(world) == PHX_OK) std::this_thread::yield();
    CHECK_FAILS(PHX_ERR_PEER_DEAD, "rank 2", phx_barrier(group, nullptr, nullptr));
    CHECK_FAILS(PHX_ERR_REVOKED, "rank 2", phx_barrier(group, nullptr, nullptr));
    phx_group_release(group);
  });
  CHECK(codes[0] == 0 && codes[1] == 0);
}

TEST(a_rank_that_leaves_is_not_called_dead) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    if (rank == 1)
      CHECK_OK(phx_world_finalize(world));
    else {
      CHECK_FAILS(PHX_ERR_PEER_DEAD, "has left", phx_barrier(group, nullptr, nullptr));
    }
    phx_group_release(group);
  });
}

// Whichever of the two sees the departure first goes no further; the other may be waiting for that one alone.
TEST(a_departure_that_one_rank_has_noticed_ends_the_waits_of_the_others) {
  for (int round = 0; round < 30; ++round)
    ranks::as_threads(3, [](int rank, phx_world *world) {
      phx_group *group = ranks::make_group(world), *rest = nullptr;
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      if (rank == 2) {
        CHECK_OK(phx_world_finalize(world));
      } else {
        phx_status status = PHX_OK;
        while (status == PHX_OK) status = phx_barrier(group, nullptr, nullptr);
        CHECK(status == PHX_ERR_PEER_DEAD);
        CHECK(std::strstr(phx_last_error(), "rank 2") != nullptr);
        CHECK_OK(phx_group_shrink(group, "rest", 0, &rest));
        CHECK(phx_group_size(rest) == 2);
        phx_group_release(rest);
      }
      phx_group_release(group);
    });
}

// Holds the thread that logs the failure of group 'busy'.
struct HeldLog {
  std::atomic<bool> holds{false}, go{false};
  static void write(void *self, int32_t, const char *, int32_t, const char *line) {
    auto &log = *static_cast<HeldLog *>(self);
    if (std::strstr(line, "group 'busy' failed") == nullptr) return;
    log.holds = true;
    while (!log.go) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the next call comes first
  }
};

// The monitor of rank 0 is busy when rank 2 leaves and its process ends, so an exchange is the first to find it out. It
// must not take that for a death, which rank 1 would find out itself: rank 1 waits for rank 0, which goes no further.
TEST(a_rank_that_left_is_not_called_dead_though_its_process_has_ended) {
  const std::vector<int> codes = ranks::as_processes(3, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world), *busy = nullptr, *half = nullptr, *rest = nullptr;
    const int32_t members[] = {0, 1};
    int32_t pid = getpid();
    CHECK_OK(phx_broadcast(group, &pid, 1, PHX_DTYPE_I32, 2, nullptr, nullptr));
    if (rank == 2) {
      CHECK_OK(phx_recv(group, &pid, 1, PHX_DTYPE_I32, 0, 0, nullptr, nullptr));
      CHECK_OK(phx_world_finalize(world));
      return;
    }
    static HeldLog log;
    if (rank == 0) {
      setenv("PHALANX_DUMP", "/nowhere", 1);
      CHECK_OK(phx_set_log(&HeldLog::write, &log, PHX_LOG_WARNING));
    }
    CHECK_OK(phx_group_create(world, "busy", members, 2, 0, &busy));
    if (rank == 1) {
      CHECK_OK(phx_group_revoke(busy, "a test"));
      phx_options options = PHX_OPTIONS_INIT;
      options.timeout_ms = 10000;
      CHECK_FAILS(PHX_ERR_PEER_DEAD, "rank 2", phx_recv(group, &pid, 1, PHX_DTYPE_I32, 0, 0, &options, nullptr));
    } else {
      while (!log.holds) std::this_thread::yield();
      CHECK_OK(phx_send(group, &pid, 1, PHX_DTYPE_I32, 2, 0, nullptr, nullptr));
      while (!phx::process_has_ended(pid)) std::this_thread::yield();
      log.go = true;
      CHECK_FAILS(PHX_ERR_PEER_DEAD, "has left", phx_group_split(group, 0, 0, "half", 0, &half));
      CHECK_OK(phx_set_log(nullptr, nullptr, PHX_LOG_ERROR));
    }
    CHECK_OK(phx_group_shrink(group, "rest", 0, &rest));
    phx_group_release(rest);
    phx_group_release(busy);
    phx_group_release(group);
  });
  CHECK(codes[0] == 0 && codes[1] == 0);
}

// It may have revoked a group before it left, while messages to it were under way: the cause must not be lost.
TEST(what_a_peer_sent_last_is_read_though_it_left_messages_unread) {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  phx::Fd here(ends[0]), there(ends[1]);
  const phx::Envelope envelope{phx::kWireMagic, phx::MessageKind::kGoodbye, 0, 0, 0, 0, 0};
  CHECK(phx::send_record(here.get(), &envelope, sizeof envelope));   // nobody reads it
  CHECK(phx::send_record(there.get(), &envelope, sizeof envelope));  // the last words
  there.reset();
  phx::Message message;
  CHECK(phx::receive_message(here.get(), &message) == phx::Receive::kMessage);
  CHECK(message.envelope.kind == phx::MessageKind::kGoodbye);
  CHECK(phx::receive_message(here.get(), &message) == phx::Receive::kClosed);
}

TEST(revoke_ends_a_wait_on_another_rank) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    if (rank == 0)
      CHECK_FAILS(PHX_ERR_REVOKED, "rank 1 revoked it: enough", phx_barrier(group, nullptr, nullptr));
    else
      CHECK_OK(phx_group_revoke(group, "enough"));
    phx_group_release(group);
  });
}

TEST(ranks_on_different_hosts_without_a_carrier_are_refused_alike) {
  ranks::as_threads(2, [](int rank, phx_world *) {
    static phx_store *store = nullptr;
    static std::atomic<int> ready{0};
    if (rank == 0) {
      CHECK_OK(phx_store_memory(&store));
      ready = 1;
    }
    while (ready == 0) std::this_thread::yield();
    ranks::Options options;
    options.host_id = 100 + rank;
    phx_world *world = ranks::make_world(rank, 2, store, options);
    CHECK(phx_world_host_id(world) == 100u + rank);
    phx_group *group = nullptr;
    const int32_t both[] = {0, 1};
    if (rank == 1) ranks::set_no_carrier(world);
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "rank 1 cannot serve that: there is no carrier here",
                phx_group_create(world, "far", both, 2, 0, &group));
    phx_world_release(world);
    if (ready.fetch_add(1) == 2) {
      phx_store_release(store);
      ready = 0;
    }
  });
}

// ---- strangers

// The id of the only world of this process, by the name of its listening socket. The kernel lists the sockets of every
// process, and tests run beside each other: this process's are those that one of its descriptors is open on.
phx::Uuid uuid_of_listener() {
  std::set<unsigned long> own;
  for (int fd = 0; fd < 1024; ++fd) {
    struct stat status {};
    if (fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode)) own.insert(status.st_ino);
  }
  FILE *file = fopen("/proc/net/unix", "r");
  CHECK(file != nullptr);
  char line[512];
  phx::Uuid uuid;
  int found = 0;
  while (fgets(line, sizeof line, file) != nullptr) {
    constexpr unsigned kListens = 0x10000;  // __SO_ACCEPTCON
    unsigned flags = 0;
    unsigned long inode = 0;
    unsigned long long high = 0, low = 0;
    if (std::sscanf(line, "%*[^:]: %*x %*x %x %*x %*x %lu @phalanx-%16llx%16llx", &flags, &inode, &high, &low) == 4 &&
        (flags & kListens) != 0 && own.count(inode) != 0) {
      uuid = {high, low};
      ++found;
    }
  }
  fclose(file);
  CHECK(found == 1);
  return uuid;
}

int connect_to(const phx::Uuid &uuid) {
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = phx::socket_name(uuid);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const socklen_t length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  CHECK(connect(fd, reinterpret_cast<sockaddr *>(&address), length) == 0);
  return fd;
}

bool is_closed_on(int fd) {  // the other side hung up without an answer
  char byte;
  return recv(fd, &byte, 1, 0) <= 0;
}

TEST(malformed_handshakes_are_refused_and_disturb_nobody) {
  ranks::as_threads(1, [](int, phx_world *) {
    const phx::Uuid uuid = uuid_of_listener();
    phx::Hello hello{phx::kWireMagic, 1, phx::random_uuid(), uuid, phx::random_uuid()};
    std::vector<std::string> attacks = {"x", std::string(sizeof hello, '\xff'), std::string(sizeof hello - 1, 0),
                                        std::string(4000, 'a')};
    attacks.emplace_back(reinterpret_cast<const char *>(&hello), sizeof hello);  // all right but for the token
    for (const std::string &attack : attacks) {
      const int fd = connect_to(uuid);
      CHECK(send(fd, attack.data(), attack.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(attack.size()));
      CHECK(is_closed_on(fd));
      close(fd);
    }
  });
}

TEST(a_process_of_another_user_is_refused) {
  if (geteuid() != 0) check::skip("becoming another user needs root");
  ranks::as_threads(1, [](int, phx_world *) {
    const phx::Uuid uuid = uuid_of_listener();
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      if (setresuid(65534, 65534, 65534) != 0) _exit(3);
      const int fd = connect_to(uuid);
      _exit(is_closed_on(fd) ? 0 : 1);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    CHECK(status == 0);
  });
}

TEST(a_forked_child_can_neither_use_nor_end_the_world_of_its_parent) {
  ranks::as_threads(2, [](int rank, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    if (rank == 0) {
      const pid_t pid = fork();
      CHECK(pid >= 0);
      if (pid == 0) {
        void *block = nullptr;
        const bool refused = phx_mem_alloc(world, nullptr, 8, &block) == PHX_ERR_UNSUPPORTED &&
                             std::strstr(phx_last_error(), "is a fork of it") != nullptr;
        phx_group_release(group);
        phx_world_release(world);
        _exit(refused ? 0 : 1);
      }
      int status = -1;
      waitpid(pid, &status, 0);
      CHECK(status == 0);
    }
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    phx_group_release(group);
  });
}

int open_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd)
    if (fcntl(fd, F_GETFD) >= 0) ++count;
  return count;
}

TEST(worlds_groups_and_memory_leave_no_descriptor_behind) {
  auto once = [] {
    ranks::as_threads(2, [](int, phx_world *world) {
      phx_group *group = ranks::make_group(world);
      void *block = nullptr;
      CHECK_OK(phx_mem_alloc(world, nullptr, 4096, &block));
      phx_symm *symm = nullptr;
      CHECK_OK(phx_symm_rendezvous(group, block, 0, &symm));
      CHECK_OK(phx_symm_barrier(symm, 0, 0));
      phx_symm_release(symm);
      CHECK_OK(phx_mem_free(world, block));
      phx_group_release(group);
    });
  };
  once();
  const int before = open_descriptors();
  for (int i = 0; i < 20; ++i) once();
  CHECK(open_descriptors() == before);
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
