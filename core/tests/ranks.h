// Runs the ranks of a test: as threads of this process (which sanitizers can see into) or as forked processes.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "phalanx/carrier.h"

namespace ranks {

struct Options {
  uint64_t staging_bytes = 0;
  int64_t timeout_ms = 20000;
  uint64_t host_id = 0;
  uint32_t flags = 0;
  std::vector<uint64_t> host_ids = {};                 // by rank, for ranks that are to count as those of several hosts
  std::function<void(phx_world *)> prepare = nullptr;  // called with each new world
};

inline phx_world *make_world(int rank, int size, phx_store *store, const Options &options = {}) {
  phx_world_params params{};
  params.struct_size = sizeof params;
  params.flags = options.flags;
  params.rank = rank;
  params.size = size;
  params.store = store;
  params.timeout_ms = options.timeout_ms;
  params.staging_bytes = options.staging_bytes;
  params.host_id = options.host_ids.empty() ? options.host_id : options.host_ids[static_cast<size_t>(rank)];
  phx_world *world = nullptr;
  CHECK_OK(phx_world_create(&params, &world));
  if (options.prepare) options.prepare(world);
  return world;
}

inline phx_group *make_group(phx_world *world, const char *name = "all",
                             int32_t reduction_order = PHX_REDUCTION_ORDER_DEFAULT) {
  std::vector<int32_t> all;
  for (int32_t i = 0; i < phx_world_size(world); ++i) all.push_back(i);
  phx_group_options options = PHX_GROUP_OPTIONS_INIT;
  options.reduction_order = reduction_order;
  phx_group *group = nullptr;
  CHECK_OK(
      phx_group_create_with_options(world, name, all.data(), static_cast<int32_t>(all.size()), &options, 0, &group));
  return group;
}

// A carrier that cannot be opened, as where there is no UCX.
inline void set_no_carrier(phx_world *world) {
  phx_carrier_ops ops{};
  ops.struct_size = sizeof ops;
  ops.name = "none";
  ops.open = [](void *, void **) -> phx_status {
    return phx_set_error(PHX_ERR_UNSUPPORTED, "there is no carrier here");
  };
  ops.address = [](void *, void *, size_t *) -> phx_status { return PHX_ERR_INTERNAL; };
  ops.connect = [](void *, const void *, size_t, void **) -> phx_status { return PHX_ERR_INTERNAL; };
  ops.send = [](void *, void *, uint64_t, const void *, size_t, void **) -> phx_status { return PHX_ERR_INTERNAL; };
  ops.recv = [](void *, void *, uint64_t, void *, size_t, void **) -> phx_status { return PHX_ERR_INTERNAL; };
  ops.test = [](void *, void *, int32_t *, size_t *) -> phx_status { return PHX_ERR_INTERNAL; };
  ops.cancel = [](void *, void *) {};
  ops.progress = [](void *) -> int32_t { return 0; };
  ops.disconnect = [](void *, void *, int32_t) {};
  ops.close = [](void *) {};
  CHECK_OK(phx_world_set_carrier(world, &ops, nullptr));
}

using Body = std::function<void(int rank, phx_world *world)>;

// Every rank has a world over a memory store. A failed CHECK in any rank fails the test.
inline void as_threads(int size, const Body &body, const Options &options = {}) {
  phx_store *store = nullptr;
  CHECK_OK(phx_store_memory(&store));
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        phx_world *world = make_world(rank, size, store, options);
        body(rank, world);
        phx_world_release(world);
      } catch (const std::exception &) {
        ++failures;
      }
    });
  }
  for (auto &thread : threads) thread.join();
  phx_store_release(store);
  CHECK(failures == 0);
}

// A store that forked children reach by path; removed at the end.
class FileStore {
 public:
  FileStore() {
    char name[] = "/tmp/phalanx-test-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    directory_ = name;
  }
  ~FileStore() {
    const std::string command = "rm -rf " + directory_;
    (void)!std::system(command.c_str());
  }
  std::string path() const { return directory_ + "/store"; }

 private:
  std::string directory_;
};

// Every rank is a process. body may end its own process; *codes then has its wait status (0 = returned normally).
inline std::vector<int> as_processes(int size, const Body &body, const Options &options = {}) {
  FileStore file;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      int code = 1;
      try {
        phx_store *store = nullptr;
        CHECK_OK(phx_store_file(file.path().c_str(), &store));
        phx_world *world = make_world(rank, size, store, options);
        body(rank, world);
        phx_world_release(world);
        phx_store_release(store);
        code = 0;
      } catch (const std::exception &) {
      }
      _exit(code);
    }
    pids.push_back(pid);
  }
  std::vector<int> codes;
  for (pid_t pid : pids) {
    int status = -1;
    waitpid(pid, &status, 0);
    codes.push_back(status);
  }
  return codes;
}

inline void all_zero(const std::vector<int> &codes) {
  for (int code : codes) CHECK(code == 0);
}

}  // namespace ranks
