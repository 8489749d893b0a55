// What the tests of the stores share: handles, a temporary directory, child processes, and one store of each kind.
#pragma once

#include <dirent.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace fixtures {

// Long enough for a loaded machine, short enough for a failing test to end.
inline constexpr int64_t kLongMs = 60000;
inline constexpr int64_t kShortMs = 30;
inline const std::string kToken = "a secret of the tests";

class Store {
 public:
  Store() = default;
  explicit Store(phx_store *store) : store_(store) {}
  Store(Store &&other) noexcept : store_(std::exchange(other.store_, nullptr)) {}
  Store &operator=(Store &&other) noexcept {
    std::swap(store_, other.store_);
    return *this;
  }
  ~Store() { phx_store_release(store_); }
  operator phx_store *() const { return store_; }
  void reset() { phx_store_release(std::exchange(store_, nullptr)); }
  phx_store **out() { return &store_; }

 private:
  phx_store *store_ = nullptr;
};

inline void set(phx_store *store, const std::string &key, const std::string &value) {
  CHECK_OK(phx_store_set(store, key.c_str(), value.data(), value.size()));
}

inline std::string get(phx_store *store, const std::string &key, int64_t timeout_ms = kLongMs) {
  size_t size = 0;
  CHECK_OK(phx_store_get(store, key.c_str(), nullptr, 0, &size, timeout_ms));
  std::string value(size, '\0');
  CHECK_OK(phx_store_get(store, key.c_str(), &value[0], value.size(), &size, timeout_ms));
  CHECK(size == value.size());
  return value;
}

inline int64_t add(phx_store *store, const std::string &key, int64_t delta) {
  int64_t result = 0;
  CHECK_OK(phx_store_add(store, key.c_str(), delta, &result));
  return result;
}

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    char name[] = "/tmp/phalanx-test-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~TemporaryDirectory() {
    if (DIR *directory = opendir(path_.c_str())) {
      while (const dirent *entry = readdir(directory)) unlink((path_ + "/" + entry->d_name).c_str());
      closedir(directory);
    }
    rmdir(path_.c_str());
  }
  std::string file(const char *name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline int open_descriptors() {
  int count = 0;
  DIR *directory = opendir("/proc/self/fd");
  CHECK(directory != nullptr);
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

// Runs `body` in a child process; what it returns is whether all its CHECKs passed.
inline pid_t start_child(const std::function<void()> &body) {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid != 0) return pid;
  alarm(60);  // a child that hangs must not outlive its test
  try {
    body();
    _exit(0);
  } catch (const std::exception &) {
    _exit(1);
  }
}

inline bool child_passed(pid_t pid) {
  int status = 0;
  return waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

inline Store memory_store() {
  Store store;
  CHECK_OK(phx_store_memory(store.out()));
  return store;
}

inline Store file_store(const std::string &path) {
  Store store;
  CHECK_OK(phx_store_file(path.c_str(), store.out()));
  return store;
}

inline Store serve(uint16_t *port, const char *address = "127.0.0.1") {
  Store store;
  CHECK_OK(phx_store_tcp_serve(address, kToken.data(), kToken.size(), port, store.out()));
  return store;
}

inline Store connect_to(uint16_t port, const char *address = "127.0.0.1") {
  Store store;
  CHECK_OK(phx_store_tcp_connect(address, port, kToken.data(), kToken.size(), kLongMs, store.out()));
  return store;
}

// A store as a caller might write it: it never waits, so it shows also how the library treats one that gives up at
// once.
class OwnStore {
 public:
  static phx_store_ops ops() {
    phx_store_ops table{};
    table.struct_size = sizeof table;
    table.set = [](void *self, const char *key, const void *value, size_t size) -> phx_status {
      OwnStore &store = *static_cast<OwnStore *>(self);
      std::lock_guard<std::mutex> lock(store.mutex_);
      store.values_[key].assign(static_cast<const char *>(value), size);
      return PHX_OK;
    };
    table.get = [](void *self, const char *key, void *value, size_t capacity, size_t *size, int64_t) -> phx_status {
      OwnStore &store = *static_cast<OwnStore *>(self);
      std::lock_guard<std::mutex> lock(store.mutex_);
      ++store.gets;
      const auto found = store.values_.find(key);
      if (found == store.values_.end()) return PHX_ERR_TIMEOUT;
      *size = found->second.size();
      std::memcpy(value, found->second.data(), std::min(capacity, *size));
      return PHX_OK;
    };
    table.add = [](void *self, const char *key, int64_t delta, int64_t *result) -> phx_status {
      OwnStore &store = *static_cast<OwnStore *>(self);
      std::lock_guard<std::mutex> lock(store.mutex_);
      std::string &text = store.values_[key];
      *result = (text.empty() ? 0 : std::strtoll(text.c_str(), nullptr, 10)) + delta;
      text = std::to_string(*result);
      return PHX_OK;
    };
    table.remove = [](void *self, const char *key) -> phx_status {
      OwnStore &store = *static_cast<OwnStore *>(self);
      std::lock_guard<std::mutex> lock(store.mutex_);
      return store.values_.erase(key) == 1 ? PHX_OK : PHX_ERR_NOT_FOUND;
    };
    table.destroy = [](void *self) { ++static_cast<OwnStore *>(self)->destroyed; };
    return table;
  }

  int gets = 0;
  int destroyed = 0;

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

// Calls `body` with two handles of the same store, for every kind of store. They may be equal.
inline void for_each_kind(const std::function<void(phx_store *, phx_store *)> &body) {
  const auto run = [&](const char *kind, phx_store *a, phx_store *b) {
    std::fprintf(stderr, "    %s\n", kind);
    body(a, b);
  };
  {
    Store store = memory_store();
    run("memory", store, store);
  }
  {
    TemporaryDirectory directory;
    Store a = file_store(directory.file("store")), b = file_store(directory.file("store"));
    run("file", a, b);
  }
  {
    uint16_t port = 0;
    Store server = serve(&port);
    Store a = connect_to(port), b = connect_to(port);
    run("tcp client and client", a, b);
  }
  {
    uint16_t port = 0;
    Store server = serve(&port);
    Store client = connect_to(port);
    run("tcp server and client", server, client);
  }
  {
    uint16_t port = 0;
    Store server = serve(&port);
    Store client = connect_to(port);
    run("tcp client and server", client, server);
  }
  {
    Store base = memory_store(), a, b;
    CHECK_OK(phx_store_prefix(base, "job/", a.out()));
    CHECK_OK(phx_store_prefix(base, "job/", b.out()));
    run("prefix", a, b);
  }
  {
    OwnStore own;
    const phx_store_ops ops = OwnStore::ops();
    Store store;
    CHECK_OK(phx_store_wrap(&ops, &own, store.out()));
    run("wrapped", store, store);
  }
}

}  // namespace fixtures
