// Waiting for a word: also where the writer is said to be on the same core, and does not announce what it stores.
#include <sched.h>

#include <chrono>
#include <thread>

#include "base/wait.h"
#include "check.h"

namespace {

using phx::SharedWord;
using phx::WaitResult;

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

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
