// What a program needs besides main.cpp: ranks that are threads, other stores, and work that goes on meanwhile.
#include <array>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <phalanx/phalanx.hpp>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

static void require(bool condition, const char *what) {
  if (!condition) throw std::runtime_error(std::string("wrong: ") + what);
}

// [work]
static void overlap(const phalanx::Group &group, int rank) {
  std::vector<float> gradients(1 << 16, static_cast<float>(rank + 1));
  std::array<int, 2> counts = {rank, 10 * rank};
  phalanx::Work works[] = {group.start().all_reduce(gradients, gradients, phalanx::Op::avg),
                           group.start().all_reduce(counts, counts)};  // the same order on all ranks
  while (!works[1].test()) {
    // Compute something else. What was started goes on inside test, wait and every other call of the group.
  }
  works[0].wait(std::chrono::seconds(20));
  require(gradients[0] == 1.5f && counts[1] == 10, "what was started");
}
// [work end]

// [own store]
// A store that the launcher has already: set, get and add of strings, for all ranks. Here it is a map of this process.
struct LauncherStore : phalanx::StoreBackend {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::string, std::string, std::less<>> values;
  };
  explicit LauncherStore(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

  phx_status set(std::string_view key, std::string_view value) override {
    const std::lock_guard lock(shared_->mutex);
    shared_->values[std::string(key)] = value;
    shared_->changed.notify_all();
    return PHX_OK;
  }
  phx_status get(std::string_view key, phalanx::Milliseconds timeout, std::string *value) override {
    std::unique_lock lock(shared_->mutex);
    const auto is_there = [&] { return shared_->values.count(key) != 0; };
    if (!shared_->changed.wait_for(lock, timeout, is_there)) return PHX_ERR_TIMEOUT;
    *value = shared_->values.find(key)->second;
    return PHX_OK;
  }
  phx_status add(std::string_view key, int64_t delta, int64_t *result) override {
    const std::lock_guard lock(shared_->mutex);
    std::string &value = shared_->values[std::string(key)];
    *result = (value.empty() ? 0 : std::stoll(value)) + delta;
    value = std::to_string(*result);
    return PHX_OK;
  }

 private:
  std::shared_ptr<Shared> shared_;
};
// [own store end]

// [threads]
// Each thread is a rank with a world of its own. `store_of` gives each its store.
template <class StoreOf>
static void run_threads(StoreOf store_of) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([=] {
      const phalanx::Store store = store_of();
      const auto world = phalanx::World::create(rank, 2, store);
      const auto group = world.group("threads");
      overlap(group, rank);
      group.barrier();
    });
  for (std::thread &thread : threads) thread.join();
}
// [threads end]

int main() try {
  const auto memory = phalanx::Store::memory();
  run_threads([&memory] { return memory.share(); });  // all ranks are in this process

  const auto shared = std::make_shared<LauncherStore::Shared>();
  run_threads([shared] { return phalanx::Store::wrap(std::make_unique<LauncherStore>(shared)); });

  // [tcp]
  // In one process, at an address that all ranks reach. Give the token, which nobody can guess, to the ranks only.
  std::random_device random;
  std::string token;
  for (int word = 0; word < 8; ++word) token += std::to_string(random()) + '.';
  const auto served = phalanx::Store::tcp_serve("127.0.0.1", token);
  // In every rank:
  const auto connect = [port = served.port, token] { return phalanx::Store::tcp_connect("127.0.0.1", port, token); };
  // [tcp end]
  run_threads(connect);
  std::puts("threads, stores and work: all is right");
} catch (const std::exception &error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
