// Waiting for a word: also where the writer is said to be on the same core, and does not announce what it stores.
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "base/wait.h"
#include "check.h"

namespace {

using phx::SharedWord;
using phx::WaitResult;

std::atomic<int> yields{0};
std::atomic<int64_t> yield_ms{0};  // how long each one takes: programs that compute want the core

}  // namespace

extern "C" int sched_yield() noexcept {
  yields.fetch_add(1);
  if (const int64_t ms = yield_ms.load(); ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(ms));
  return static_cast<int>(syscall(SYS_sched_yield));
}

namespace {

// Keeps this thread on the core it is on, so that the hint stays true.
void stay() {
  const int core = sched_getcpu();
  CHECK(core >= 0);
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  CHECK(sched_setaffinity(0, sizeof only, &only) == 0);
}

// Waits on a thread of its own, which thinks that the writer is on its core, while `act` runs here. The writer's hint
// is wrong as soon as there are two cores, so nothing but the waiter's own slices may end the wait.
template <class Act>
WaitResult wait_beside(SharedWord &word, const std::atomic<int32_t> &interrupted, int64_t timeout_ms, Act act) {
  WaitResult result = WaitResult::kTimeout;
  SharedWord sleepers{0};
  std::thread waiter([&] {
    stay();
    const SharedWord core{phx::current_core()};
    phx::LazyDeadline deadline(timeout_ms);
    result = phx::wait_reached(word, 1, sleepers, interrupted, deadline, &core);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(1));  // it is yielding, or asleep
  act();
  waiter.join();
  CHECK(sleepers.load() == 0);
  return result;
}

TEST(a_word_that_nobody_announces_is_seen) {  // A rank that moved to another core may miss a sleeper on its old one.
  for (int i = 0; i < 20; ++i) {
    SharedWord word{0};
    const std::atomic<int32_t> interrupted{0};
    CHECK(wait_beside(word, interrupted, 30000, [&] { word.store(1, std::memory_order_release); }) ==
          WaitResult::kReached);
  }
}

TEST(an_interruption_that_nobody_announces_is_seen) {
  for (int i = 0; i < 20; ++i) {
    SharedWord word{0};
    std::atomic<int32_t> interrupted{0};
    CHECK(wait_beside(word, interrupted, 30000, [&] { interrupted.store(1); }) == WaitResult::kInterrupted);
  }
}

TEST(the_deadline_ends_it) {
  SharedWord word{0};
  const std::atomic<int32_t> interrupted{0};
  CHECK(wait_beside(word, interrupted, 20, [] {}) == WaitResult::kTimeout);
}

// The reason for all that: a writer that has used more of the core than the waiter must get it back.
TEST(a_writer_on_the_same_core_goes_on) {
  SharedWord word{0}, sleepers{0};
  const std::atomic<int32_t> interrupted{0};
  stay();  // and so does the thread, which inherits it
  const SharedWord core{phx::current_core()};
  for (uint32_t turn = 1; turn <= 20; ++turn) {
    std::thread writer([&] {
      const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
      while (std::chrono::steady_clock::now() < until) phx::cpu_relax();
      phx::store_and_wake(word, turn, sleepers, false);
    });
    phx::LazyDeadline deadline(30000);
    CHECK(phx::wait_reached(word, turn, sleepers, interrupted, deadline, &core) == WaitResult::kReached);
    writer.join();
  }
}

// Two threads that answer each other in turn. Returns how often they yielded.
int yields_of_turns(uint32_t turns, const SharedWord *core) {
  SharedWord asked{0}, answered{0}, sleepers{0};
  const std::atomic<int32_t> interrupted{0};
  const auto await = [&](const SharedWord &word, uint32_t turn) {
    phx::LazyDeadline deadline(30000);
    CHECK(phx::wait_reached(word, turn, sleepers, interrupted, deadline, core) == WaitResult::kReached);
  };
  yields = 0;
  yield_ms = 2;
  std::thread other([&] {
    for (uint32_t turn = 1; turn <= turns; ++turn) {
      await(asked, turn);
      phx::store_and_wake(answered, turn, sleepers, false);
    }
  });
  for (uint32_t turn = 1; turn <= turns; ++turn) {
    phx::store_and_wake(asked, turn, sleepers, false);
    await(answered, turn);
  }
  other.join();
  yield_ms = 0;
  return yields.load();
}

// Each wait of both threads would otherwise cost a slice of time of the program. Now and then one yield is tried.
TEST(waits_do_not_yield_where_other_programs_want_the_core) {
  constexpr int kTurns = 300;
  CHECK(yields_of_turns(kTurns, nullptr) < kTurns);
  stay();
  const SharedWord core{phx::current_core()};
  CHECK(yields_of_turns(kTurns, &core) < kTurns);
}

TEST(a_wait_that_has_slept_looks_before_it_yields) {
  phx::LazyDeadline deadline(30000);
  int looks = 0, sleeps = 0;
  yields = 0;
  yield_ms = 2;
  const auto look = [&] { return ++looks > 20 ? WaitResult::kReached : WaitResult::kNothing; };
  const auto sleep = [&] { return ++sleeps, WaitResult::kNothing; };
  CHECK(phx::Waiter(deadline).wait(look, sleep) == WaitResult::kReached);
  yield_ms = 0;
  CHECK(yields.load() <= 1 && sleeps >= 19);
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
