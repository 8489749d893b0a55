// What a process finds around it: signals, environment variables, a container that refuses system calls, ranks that are
// late, of another build, of another network namespace, of another host id.  C2
#include <dirent.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cstring>
#include <fstream>
#include <new>
#include <set>

#include "base/entropy.h"
#include "base/environment.h"
#include "base/hash.h"
#include "base/sanitizers.h"
#include "base/wait.h"
#include "pipe.h"
#include "ranks.h"
#include "world/monitor.h"
#include "world/world.h"

namespace {

// Runs `body` in a forked child and returns its wait status. A child that hangs is ended by SIGALRM.
template <class Body>
int in_child(Body body) {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    alarm(60);
    int code = 1;
    try {
      body();
      code = 0;
    } catch (const check::Skipped &) {
      code = 77;
    } catch (const std::exception &) {
    }
    _exit(code);
  }
  int status = -1;
  waitpid(pid, &status, 0);
  return status;
}

bool says(const char *text) {
  if (std::strstr(phx_last_error(), text) != nullptr) return true;
  std::fprintf(stderr, "    not said: %s\n    but: %s\n", text, phx_last_error());
  return false;
}

// ---- threads

struct ThreadSeen {
  std::string name;
  uint64_t blocked;
};
std::vector<ThreadSeen> other_threads() {
  std::vector<ThreadSeen> all;
  DIR *tasks = opendir("/proc/self/task");
  CHECK(tasks != nullptr);
  while (const dirent *entry = readdir(tasks)) {
    if (entry->d_name[0] == '.' || std::atoi(entry->d_name) == getpid()) continue;
    std::ifstream status("/proc/self/task/" + std::string(entry->d_name) + "/status");
    ThreadSeen seen{};
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("Name:", 0) == 0) seen.name = line.substr(6);
      if (line.rfind("SigBlk:", 0) == 0) seen.blocked = std::stoull(line.substr(8), nullptr, 16);
    }
    all.push_back(seen);
  }
  closedir(tasks);
  return all;
}

TEST(threads_of_the_library_have_names_and_take_no_signals) {
  const int status = in_child([] {
    phx_world *world = ranks::make_world(0, 1, nullptr);
    phx_store *store = nullptr;
    uint16_t port = 0;
    CHECK_OK(phx_store_tcp_serve("127.0.0.1", "0123456789abcdef", 16, &port, &store));
    std::set<std::string> names;
    for (int i = 0; i < 2000 && names.size() < 2; ++i) {  // a new thread names itself
      names.clear();
      for (const ThreadSeen &thread : other_threads())
        if (thread.name.rfind("phx-", 0) == 0) names.insert(thread.name);
      usleep(1000);
    }
    CHECK(names == (std::set<std::string>{"phx-monitor", "phx-store"}));
    for (const ThreadSeen &thread : other_threads())
      for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD, SIGALRM, SIGPIPE})
        CHECK((thread.blocked >> (number - 1) & 1) != 0);
    // What the application blocks from now on stays pending for it.
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, SIGUSR1);
    CHECK(sigprocmask(SIG_BLOCK, &one, nullptr) == 0);
    CHECK(kill(getpid(), SIGUSR1) == 0);
    const timespec limit{20, 0};
    CHECK(sigtimedwait(&one, nullptr, &limit) == SIGUSR1);
    phx_store_release(store);
    phx_world_release(world);
  });
  CHECK(status == 0);
}

class Listener final : public phx::GroupListener {
 public:
  explicit Listener(bool fails) : fails_(fails) {}
  bool has_peer(const phx::Uuid &) const override {
    if (fails_) throw std::bad_alloc();
    return false;
  }
  void on_peer_gone(const phx::Link &, phx::LinkState, bool) override {}
  void on_revoked(const phx::ErrorInfo &cause) override { told_.send(cause); }
  phx::ErrorInfo told() const { return told_.receive<phx::ErrorInfo>(); }

 private:
  const bool fails_;
  Pipe told_;
};

TEST(an_exception_in_the_monitor_fails_the_groups_and_not_the_process) {
  phx_world *seen = ranks::make_world(0, 1, nullptr);
  const auto broken = std::make_shared<Listener>(true), healthy = std::make_shared<Listener>(false);
  phx::Monitor &monitor = seen->ptr->monitor();
  monitor.watch(1, broken);
  monitor.watch(2, healthy);
  phx::PeerRecord self = seen->ptr->record();
  self.uuid = {1, 2};
  phx::Dial dial(self, seen->ptr->record(), false);
  CHECK(dial.begin() == phx::Dial::Step::kWaits);
  const auto answered = [&] { return dial.advance() == phx::Dial::Step::kDone; };
  CHECK(phx::Backoff(50, 1000).until(phx::Deadline::after_ms(20000), answered));
  const phx::LinkRef link = dial.make_link();
  phx::LinkRef other;
  CHECK_OK(monitor.await_link(self.uuid, phx::Deadline::after_ms(20000), &other));
  link->close();  // which the monitor is to tell the groups
  for (const Listener *listener : {broken.get(), healthy.get()}) {
    const phx::ErrorInfo cause = listener->told();
    CHECK(cause.status == PHX_ERR_NO_MEMORY && cause.rank == 0);
    CHECK(std::strstr(cause.text, "monitor thread of rank 0") != nullptr);
  }
  const auto late = std::make_shared<Listener>(false);  // a group that is made later
  monitor.watch(3, late);
  CHECK(late->told().status == PHX_ERR_NO_MEMORY);
  phx_world_release(seen);
}

// ---- environment variables

TEST(environment_variables_are_listed_once_in_order_and_unknown_ones_get_a_suggestion) {
  for (size_t i = 1; i < phx::kVariableCount; ++i) {
    const phx::Variable &before = phx::kVariables[i - 1], &row = phx::kVariables[i];
    const bool internal = std::strcmp(row.reader, phx::kInternal) == 0;
    const bool internal_before = std::strcmp(before.reader, phx::kInternal) == 0;
    CHECK(internal_before <= internal && (internal_before != internal || std::strcmp(before.name, row.name) < 0));
  }
  CHECK(in_child([] {
          CHECK(phx::unknown_variables().empty());
          setenv("PHALANX_TUNNING", "x", 1);
          CHECK(phx::unknown_variables() == "PHALANX_TUNNING (did you mean PHALANX_TUNING?)");
          unsetenv("PHALANX_TUNNING");
          setenv("PHALANX_PORT_29500_TCP", "tcp://10.0.0.1:29500", 1);  // of Kubernetes
          setenv("PHALANX_NOTHING_LIKE_IT", "x", 1);
          CHECK(phx::unknown_variables() == "PHALANX_NOTHING_LIKE_IT");
        }) == 0);
}

// What the log callback of a process got.
struct Log {
  std::string lines;
  static void write(void *self, phx_log_level, const char *, int32_t, const char *line) {
    static_cast<Log *>(self)->lines += std::string(line) + "\n";
  }
  bool has(const char *text) const {
    if (lines.find(text) != std::string::npos) return true;
    std::fprintf(stderr, "    not logged: %s\n    but: %s\n", text, lines.c_str());
    return false;
  }
};

TEST(the_first_world_warns_once_about_variables_that_are_wrong) {
  CHECK(in_child([] {
          char table[] = "/tmp/phalanx-test-XXXXXX";
          const int fd = mkstemp(table);
          const char rows[] = "host=1 ranks=2 chunk_bytes=131072\nhost=1 ranks=2 chunk_bytes=12z\n";
          CHECK(write(fd, rows, sizeof rows - 1) == static_cast<ssize_t>(sizeof rows - 1));
          close(fd);
          setenv("PHALANX_TUNING", table, 1);
          setenv("PHALANX_ISA", "sse9", 1);
          setenv("PHALANX_DUMP", "/nowhere/dumps", 1);
          setenv("PHALANX_WAIT_WARNING_S", "soon", 1);
          setenv("PHALANX_DUMPS", "/tmp", 1);
          Log log;
          CHECK_OK(phx_set_log(&Log::write, &log, PHX_LOG_WARNING));
          phx_world_release(ranks::make_world(0, 1, nullptr));
          unlink(table);
          CHECK(log.has("PHALANX_ISA is 'sse9'") && log.has("scalar. '"));
          CHECK(log.has("is damaged: line 2: chunk_bytes is '12z'; expected 4096 to 1073741824"));
          CHECK(log.has("PHALANX_DUMP is '/nowhere/dumps', which does not exist"));
          CHECK(log.has("PHALANX_WAIT_WARNING_S is 'soon'"));
          CHECK(log.has("PHALANX_DUMPS (did you mean PHALANX_DUMP?)"));
          log.lines.clear();
          phx_world_release(ranks::make_world(0, 1, nullptr));
          CHECK(log.lines.empty());
        }) == 0);
}

TEST(no_line_is_logged_where_the_variables_are_right) {
  CHECK(in_child([] {
          setenv("PHALANX_ISA", "scalar", 1);
          setenv("PHALANX_DUMP", "/tmp", 1);
          setenv("PHALANX_TUNING", "/nowhere/table", 1);  // `phalanx tune` is to write it
          Log log;
          CHECK_OK(phx_set_log(&Log::write, &log, PHX_LOG_WARNING));
          phx_world_release(ranks::make_world(0, 1, nullptr));
          CHECK(log.lines.empty());
        }) == 0);
}

// ---- ranks that are late

TEST(a_long_wait_names_the_ranks_and_the_call) {
  // Ranks 0 and 1 make each call and wait for rank 2, which makes it when both have logged a line about it.
  struct Waiting : Log {
    Pipe told;
    std::string expected;
    static void write(void *self, phx_log_level level, const char *file, int32_t line, const char *text) {
      auto &log = *static_cast<Waiting *>(self);
      Log::write(self, level, file, line, text);
      if (!log.expected.empty() && std::strstr(text, log.expected.c_str()) != nullptr) {
        log.expected.clear();
        log.told.send(1);
      }
    }
  } log;
  ranks::all_zero(ranks::as_processes(
      3,
      [&](int self, phx_world *world) {
        const auto late = [&](const char *call, const std::function<void()> &body) {
          if (self == 2) {
            for (int i = 0; i < 2; ++i) CHECK(log.told.receive<int>() == 1);
          } else {
            log.expected = "rank " + std::to_string(self) + ": still waiting for rank 2 on group 'all': " + call + " (";
          }
          body();
          CHECK(log.expected.empty());
        };
        phx_group *group = nullptr;
        phx_symm *symm = nullptr;
        void *memory = nullptr;
        float in = 1, out = 0;
        CHECK_OK(phx_mem_alloc(world, nullptr, 4096, &memory));
        late("group_create", [&] { group = ranks::make_group(world); });
        late("all_reduce #1",
             [&] { CHECK_OK(phx_all_reduce(group, &in, &out, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr)); });
        late("barrier #2", [&] { CHECK_OK(phx_barrier(group, nullptr, nullptr)); });
        late("symm_rendezvous", [&] { CHECK_OK(phx_symm_rendezvous(group, memory, 0, &symm)); });
        late("symm_barrier", [&] { CHECK_OK(phx_symm_barrier(symm, 0, 0)); });
        late("symm_wait_signal", [&] {
          if (self != 2) CHECK_OK(phx_symm_wait_signal(symm, 2, 0, 0));
          for (int i = 0; i < 2 && self == 2; ++i) CHECK_OK(phx_symm_put_signal(symm, i, 0));
        });
        late("recv", [&] {
          if (self != 2) CHECK_OK(phx_recv(group, &in, 1, PHX_DTYPE_F32, 2, 0, nullptr, nullptr));
          for (int i = 0; i < 2 && self == 2; ++i)
            CHECK_OK(phx_send(group, &in, 1, PHX_DTYPE_F32, i, 0, nullptr, nullptr));
        });
        late("group_agree", [&] {
          uint64_t bits = 1;
          CHECK_OK(phx_group_agree(group, &bits, nullptr, 0));
        });
        phx_symm_release(symm);
        phx_group_release(group);
      },
      {.prepare = [&](phx_world *) {
        setenv("PHALANX_WAIT_WARNING_S", "0.05", 1);
        CHECK_OK(phx_set_log(&Waiting::write, static_cast<Log *>(&log), PHX_LOG_WARNING));
      }}));
}

TEST(no_wait_is_reported_where_the_variable_is_zero) {
  CHECK(in_child([] {
          setenv("PHALANX_WAIT_WARNING_S", "0", 1);
          Log log;
          CHECK_OK(phx_set_log(&Log::write, &log, PHX_LOG_WARNING));
          phx_store *store = nullptr;
          CHECK_OK(phx_store_memory(&store));
          phx_world *world = ranks::make_world(0, 2, store);
          const int32_t both[2] = {0, 1};
          phx_group *group = nullptr;
          CHECK(phx_group_create(world, "lonely", both, 2, 100, &group) == PHX_ERR_TIMEOUT);
          CHECK(log.lines.empty());
          phx_world_release(world);
          phx_store_release(store);
        }) == 0);
}

// ---- system calls that a container refuses

void refuse(const std::vector<int> &calls, int error) {
  std::vector<sock_filter> code = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const int call : calls) {
    code.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 1));
    code.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)));
  }
  code.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(code.size()), code.data()};
  CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) check::skip("seccomp filters");
}

void expect_passed(int status) {
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) check::skip("seccomp filters");
  CHECK(status == 0);
}

TEST(a_world_is_made_where_getrandom_is_refused) {
  for (const int error : {EPERM, ENOSYS})
    expect_passed(in_child([&] {
      refuse({SYS_getrandom}, error);
      phx_world *world = ranks::make_world(0, 1, nullptr);
      phx_group *group = ranks::make_group(world);
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      CHECK(phx::random_uuid() != phx::random_uuid());
      phx_group_release(group);
      phx_world_release(world);
    }));
}

TEST(a_world_says_so_where_nothing_gives_random_bytes) {
  expect_passed(in_child([] {
    refuse({SYS_getrandom, SYS_openat}, EPERM);
    phx_world_params params{};
    params.struct_size = sizeof params;
    params.size = 1;
    phx_world *world = nullptr;
    CHECK(phx_world_create(&params, &world) == PHX_ERR_PERMISSION);
    CHECK(says("getrandom") && says("/dev/urandom") && says("seccomp"));
  }));
}

TEST(ranks_work_together_where_what_they_can_do_without_is_refused) {
  for (const int error : {EPERM, ENOSYS}) {
    ranks::FileStore file;
    const auto rank = [&](int self) {
      std::vector<int> calls = {434 /* pidfd_open */, SYS_membarrier, SYS_getrandom};
#ifndef PHX_SANITIZED  // which asks for the stack of each thread, and that fails without it
      calls.push_back(SYS_sched_getaffinity);
#endif
      refuse(calls, error);
      phx_store *store = nullptr;
      CHECK_OK(phx_store_file(file.path().c_str(), &store));
      phx_world *world = ranks::make_world(self, 2, store);
      phx_group *group = ranks::make_group(world);
      const float in = static_cast<float>(self + 1);
      float out = 0;
      CHECK_OK(phx_all_reduce(group, &in, &out, 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
      CHECK(out == 3);
      if (self == 1) _exit(0);  // dies, as far as the other one is concerned: seen by the socket alone
      CHECK(phx_barrier(group, nullptr, nullptr) == PHX_ERR_PEER_DEAD);
    };
    const pid_t other = fork();
    CHECK(other >= 0);
    if (other == 0) {
      alarm(60);
      try {
        rank(1);
      } catch (const check::Skipped &) {
      } catch (const std::exception &) {
      }
      _exit(1);
    }
    const int status = in_child([&] { rank(0); });
    int others = -1;
    waitpid(other, &others, 0);
    expect_passed(status);
    CHECK(others == 0);
  }
}

TEST(a_group_names_the_system_call_that_it_cannot_do_without) {
  expect_passed(in_child([] {
    refuse({SYS_memfd_create}, EPERM);
    phx_world *world = ranks::make_world(0, 1, nullptr);
    const int32_t self = 0;
    phx_group *group = nullptr;
    CHECK(phx_group_create(world, "alone", &self, 1, 0, &group) == PHX_ERR_PERMISSION);
    CHECK(says("memfd_create"));
  }));
}

// ---- ranks of another build

// A store that shows this rank the records of others as if another build had written them.
struct OtherBuild {
  phx_store *base;
  static bool is_record(const char *key) { return std::strstr(key, "/member/") != nullptr; }
  static phx_status set(void *self, const char *key, const void *value, size_t size) {
    return phx_store_set(static_cast<OtherBuild *>(self)->base, key, value, size);
  }
  static phx_status get(void *self, const char *key, void *value, size_t capacity, size_t *size, int64_t timeout_ms) {
    const phx_status status =
        phx_store_get(static_cast<OtherBuild *>(self)->base, key, value, capacity, size, timeout_ms);
    constexpr size_t at = offsetof(phx::PeerRecord, build) + offsetof(phx::Build, fingerprint);
    if (status == PHX_OK && is_record(key) && capacity >= *size && *size > at + 4)
      std::memcpy(static_cast<char *>(value) + at, "0000", 4);
    return status;
  }
  static phx_status add(void *self, const char *key, int64_t delta, int64_t *result) {
    return phx_store_add(static_cast<OtherBuild *>(self)->base, key, delta, result);
  }
  static phx_status remove(void *self, const char *key) {
    return phx_store_remove(static_cast<OtherBuild *>(self)->base, key);
  }
};

phx_store *with_other_builds(OtherBuild *view) {
  phx_store_ops ops{};
  ops.struct_size = sizeof ops;
  ops.set = OtherBuild::set;
  ops.get = OtherBuild::get;
  ops.add = OtherBuild::add;
  ops.remove = OtherBuild::remove;
  phx_store *store = nullptr;
  CHECK_OK(phx_store_wrap(&ops, view, &store));
  return store;
}

TEST(ranks_of_different_builds_do_not_meet_and_each_names_both_builds) {
  ranks::all_zero(ranks::as_processes(3, [](int self, phx_world *world) {
    OtherBuild view{world->ptr->store()};
    phx_store *store = with_other_builds(&view);
    phx_group *group = nullptr;
    CHECK_FAILS(PHX_ERR_ABI, "Install one build", phx_group_attach(world, "mixed", self, 3, store, 0, &group));
    const phx::Build mine = phx::this_build();
    phx::Build other = mine;
    std::memcpy(other.fingerprint, "0000", 4);
    CHECK(says(phx::text_of(mine).c_str()) && says(phx::text_of(other).c_str()));
    // Stays until all have met: a rank that comes after the others have ended cannot tell their job from an earlier
    // one.
    int64_t done = 0;
    const char *all_done = "all done";
    CHECK_OK(phx_store_add(view.base, "done", 1, &done));
    if (done == 3) CHECK_OK(phx_store_set(view.base, all_done, "", 0));
    CHECK_OK(phx_store_wait(view.base, &all_done, 1, 20000));
    phx_store_release(store);
  }));
}

TEST(a_record_of_an_older_layout_is_refused_as_what_it_is) {
  ranks::all_zero(ranks::as_processes(2, [](int self, phx_world *world) {
    if (self == 1) return;
    const char old[] = "PHXPEER\n and whatever it held";
    const int32_t members[2] = {0, 1};
    const std::string key =
        "phalanx/group/g/" + std::to_string(phx::hash_bytes(members, sizeof members)) + "/0/member/1";
    CHECK_OK(phx_store_set(world->ptr->store(), key.c_str(), old, sizeof old));
    phx_group *group = nullptr;
    CHECK(phx_group_create(world, "g", members, 2, 0, &group) == PHX_ERR_ABI);
    CHECK(says("older"));
  }));
}

TEST(the_build_is_told_by_phx_build_info) {
  const std::string fingerprint(phx::this_build().fingerprint, sizeof phx::Build::fingerprint);
  CHECK(fingerprint.find_first_not_of("0123456789abcdef") == std::string::npos);
  CHECK(std::string(phx_build_info()).find("\"build\": \"" + fingerprint + "\"") != std::string::npos);
}

// ---- ranks that share no host, or do not know it

phx::PeerRecord record_of(uint64_t boot, uint64_t network, uint64_t given = 0) {
  phx::PeerRecord record{};
  record.host = {boot, network};
  record.host_given = given != 0;
  record.host_id = given != 0 ? given : phx::host_id_of(record.host);
  return record;
}

TEST(the_reason_why_ranks_share_no_memory_is_told) {
  const auto why = [](const phx::PeerRecord &a, const phx::PeerRecord &b) { return phx::why_apart(a, 3, b, 5); };
  const auto has = [](const std::string &text, const char *part) { return text.find(part) != std::string::npos; };
  CHECK(why(record_of(1, 2), record_of(1, 2)).empty());
  CHECK(why(record_of(0, 0), record_of(0, 0)).empty());  // no /proc on either: the sockets will tell
  CHECK(why(record_of(0, 2, 7), record_of(1, 0, 7)).empty());
  CHECK(has(why(record_of(1, 2), record_of(9, 2)), "ranks 3 and 5 are on different hosts"));
  CHECK(has(why(record_of(1, 2), record_of(1, 4)), "different network namespaces (net:[2] and net:[4])"));
  CHECK(has(why(record_of(1, 2, 7), record_of(1, 4, 7)), "different network namespaces"));
  CHECK(has(why(record_of(1, 2, 7), record_of(9, 2, 7)), "different hosts"));
  CHECK(has(why(record_of(1, 2, 7), record_of(1, 2, 8)), "rank 3 was given 7 and rank 5 was given 8"));
  CHECK(has(why(record_of(1, 2), record_of(1, 2, 8)), "PHALANX_HOST_ID"));
  CHECK(has(why(record_of(0, 0), record_of(1, 2)), "rank 3 cannot read /proc"));
  CHECK(has(why(record_of(1, 2), record_of(1, 0)), "rank 5 cannot read /proc"));
}

TEST(ranks_in_different_network_namespaces_say_so_at_once) {
  ranks::FileStore file;
  const auto rank = [&](int self) {
    if (self == 1 && unshare(CLONE_NEWNET) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0)
      check::skip("network namespaces");
    phx_store *store = nullptr;
    CHECK_OK(phx_store_file(file.path().c_str(), &store));
    phx_world *world = ranks::make_world(self, 2, store);
    ranks::set_no_carrier(world);
    const int32_t members[2] = {0, 1};
    phx_group *group = nullptr;
    CHECK(phx_group_create(world, "g", members, 2, 0, &group) == PHX_ERR_UNSUPPORTED);
    CHECK(says("different network namespaces"));
  };
  const pid_t other = fork();
  CHECK(other >= 0);
  if (other == 0) {
    alarm(60);
    int code = 1;
    try {
      rank(1);
      code = 0;
    } catch (const check::Skipped &) {
      code = 77;
    } catch (const std::exception &) {
    }
    _exit(code);
  }
  const pid_t first = fork();
  CHECK(first >= 0);
  if (first == 0) {
    alarm(60);
    int code = 1;
    try {
      rank(0);
      code = 0;
    } catch (const std::exception &) {
    }
    _exit(code);
  }
  int status = -1;
  waitpid(other, &status, 0);
  if (status == 77 << 8) kill(first, SIGKILL);
  int firsts = -1;
  waitpid(first, &firsts, 0);
  if (status == 77 << 8) check::skip("network namespaces");
  CHECK(status == 0 && firsts == 0);
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
