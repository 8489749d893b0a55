#include "base/wait.h"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace phx {
namespace {

// A waiter yields for this long before it sleeps. Yields cost nothing as long as no other thread wants the core.
// Sleeping would only make the core idle, and waking an idle core takes long, above all in a virtual machine, whose
// host gives the core away: two ranks that wait for each other in turn would then sleep and wake at every step.
constexpr int64_t kYieldNs = 2 * 1000 * 1000;
constexpr int64_t kFruitlessYieldNs = 800;  // a yield that runs no other thread takes half of that
constexpr int kFruitlessYields = 2;         // after so many a waiter sleeps if the writer is on its core
constexpr int kMoreSpins = 100;    // a few microseconds at most; the length of a pause depends on the processor
constexpr int64_t kTurnNs = 2000;  // to switch to another process and back (2.5 us on an EPYC)
constexpr int64_t kMaxSleepNs = 5 * 1000 * 1000;

// What the yields of this thread tell of its core.
class Core {
 public:
  // Whether one of the last yields ran another thread. Spinning would then delay the rank that is waited for; on a core
  // of its own, spinning saves a system call that costs as much as a small collective.
  bool is_shared() const { return shared_ > 0; }
  // Whether threads that compute want it. A long yield has run such a thread, for as long as the system let it: who is
  // woken takes the core back from it, who yields does not. So waiters sleep for a while after the second long yield (a
  // single one does not tell: the host of a virtual machine may have taken the core). Then one yield is tried again,
  // and if that is long, the next while is longer.
  bool is_wanted(int64_t now) {
    if (now >= wanted_until_ns_) wanted_until_ns_ = 0;
    return was_wanted();
  }
  // As it was known last. Does not need the time.
  bool was_wanted() const { return wanted_until_ns_ != 0; }
  // Whether to time a yield that is timed only for this: one of 16, or all after a long one.
  bool is_in_question() { return tells_until_ns_ != 0 || ++yields_ % 16 == 0; }

  void yield_ran_another() { shared_ = kSharedYields; }
  // Returns whether the yield was a long one.
  bool yielded(int64_t begin, int64_t end) {
    const int64_t took = end - begin;
    if (took > kFruitlessYieldNs)
      yield_ran_another();
    else if (is_shared())
      --shared_;
    const bool tells = begin < tells_until_ns_;
    const bool is_long = took > kLongYieldNs;
    if (is_long && tells) {
      while_ns_ = std::min(2 * while_ns_, kLongestWhileNs);
      wanted_until_ns_ = end + while_ns_;
      tells_until_ns_ = wanted_until_ns_ + kAgainNs;
    } else if (is_long) {
      while_ns_ = kFirstWhileNs / 2;
      tells_until_ns_ = end + kSoonNs;
    } else if (!tells) {
      tells_until_ns_ = 0;
    }
    return is_long;
  }

 private:
  static constexpr uint32_t kSharedYields = 64;  // after so many fruitless ones in a row it no longer counts as shared
  static constexpr int64_t kMs = 1000 * 1000;
  static constexpr int64_t kLongYieldNs = kMs / 2;  // more than other ranks need for a chunk
  static constexpr int64_t kSoonNs = 10 * kMs;      // from the first long yield to the second
  static constexpr int64_t kFirstWhileNs = 20 * kMs, kLongestWhileNs = 320 * kMs;
  static constexpr int64_t kAgainNs = 100 * kMs;  // for so long after a while, one long yield tells

  uint32_t shared_ = 0;
  uint32_t yields_ = 0;
  int64_t wanted_until_ns_ = 0;  // 0: it is not
  int64_t tells_until_ns_ = 0;   // a long yield that begins before tells that it is wanted
  int64_t while_ns_ = 0;
};
thread_local Core this_core;

void sleep_ns(int64_t ns) {
  const timespec t{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
  nanosleep(&t, nullptr);  // a signal ends it early: the caller merely looks sooner
}

// Sleeps to leave the core to the writer, which is on the same core. A scheduler that is fair by time used (EEVDF,
// Linux 6.6 and later) gives a yielded core only to a thread that has used no more time than the others: a rank that
// has worked for long while this one waited would get the core back only after this one has spent as much time in
// yields. No fence is needed: a thread switch lies between the writer's store and its load of `sleepers`. If the writer
// has moved to another core meanwhile, this may sleep for the whole time.
void sleep_on_writer_core(const SharedWord &word, uint32_t target, SharedWord &sleepers, int64_t most_ns) {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = word.load(std::memory_order_seq_cst);
  if (!reached(seen, target)) sleep_while(word, seen, std::min(most_ns, kMaxSleepNs));
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace

void sleep_while(const SharedWord &word, uint32_t seen, int64_t ns) {
  timespec timeout{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
  // Not FUTEX_PRIVATE: most words lie in memory that other processes share.
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

std::atomic<bool> fences_allowed{false};

void fence_others() { syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0); }

bool allow_fences() {
  const long known = syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0);
  const bool allowed = known > 0 && (known & MEMBARRIER_CMD_GLOBAL_EXPEDITED) != 0 &&
                       syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0 &&
                       syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0) == 0;
  fences_allowed.store(allowed, std::memory_order_relaxed);
  return allowed;
}

uint32_t current_core() {
  const int core = sched_getcpu();
  return core < 0 ? 0 : static_cast<uint32_t>(core) + 1;
}

void wake_all(const SharedWord &word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

int spins_of_a_turn() {
  // A spin takes 15 to 60 ns, depending on the processor.
  static const int spins = [] {
    constexpr int kTried = 200;
    const int64_t begin = now_ns();
    for (int i = 0; i < kTried; ++i) cpu_relax();
    const int64_t spin_ns = (now_ns() - begin) / kTried;
    return static_cast<int>(kTurnNs / std::max<int64_t>(spin_ns, 5));
  }();
  return spins < kFewSpins ? kFewSpins : spins;
}

void Waiter::restart() {
  now_ = now_ns();
  sleep_at_ns_ = this_core.is_wanted(now_) ? now_ : now_ + kYieldNs;
}

void Waiter::yield() {
  if (deadline_.poll() != LazyDeadline::Elsewhere::kNothing) slept();
  const int64_t before = now_;
  sched_yield();
  now_ = now_ns();
  fruitless_yields_ = now_ - before > kFruitlessYieldNs ? 0 : fruitless_yields_ + 1;
  if (this_core.yielded(before, now_)) sleep_at_ns_ = now_;
}

void Backoff::pause(const Deadline &deadline) {
  sleep_ns(std::min(next_ns_, deadline.slice_ns()));
  next_ns_ = std::min(next_ns_ + next_ns_ / 2, longest_ns_);
}

WaitResult wait_reached_slow(const SharedWord &word, uint32_t target, SharedWord &sleepers,
                             const std::atomic<int32_t> &interrupted, LazyDeadline &deadline,
                             const SharedWord *writer_core) {
  const bool on_writer_core = runs_on_this_core(writer_core);
  Core &core = this_core;
  if (on_writer_core && !core.was_wanted()) {  // usually one yield is enough
    const int64_t before = core.is_in_question() ? now_ns() : 0;
    sched_yield();
    if (before != 0) core.yielded(before, now_ns());
    if (reached(word.load(std::memory_order_acquire), target)) {
      core.yield_ran_another();
      return WaitResult::kReached;
    }
  } else if (!core.is_shared()) {
    for (int i = 0; i < kMoreSpins; ++i) {
      if (reached(word.load(std::memory_order_acquire), target)) return WaitResult::kReached;
      cpu_relax();
    }
  }
  Waiter waiter(deadline, on_writer_core ? 1 : 0);
  const auto look = [&] {
    if (waiter.fruitless_yields() >= kFruitlessYields && runs_on_this_core(writer_core)) {
      sleep_on_writer_core(word, target, sleepers, waiter.left_ns());
      waiter.slept();
    }
    if (reached(word.load(std::memory_order_acquire), target)) return WaitResult::kReached;
    return interrupted.load(std::memory_order_acquire) != 0 ? WaitResult::kInterrupted : WaitResult::kNothing;
  };
  const auto sleep = [&] {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    fence_others();  // see store_and_wake
    const WaitResult result = sleep_until_reached(word, target, interrupted, deadline);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
    return result;
  };
  const WaitResult result = waiter.wait(look, sleep);
  // A value that arrived meanwhile wins over the interruption and the deadline.
  return reached(word.load(std::memory_order_acquire), target) ? WaitResult::kReached : result;
}

WaitResult sleep_until_reached(const SharedWord &word, uint32_t target, const std::atomic<int32_t> &interrupted,
                               LazyDeadline &deadline) {
  const LongWait wait(deadline.text(), deadline.at_ns(), deadline.budget_ms());
  uint32_t seen = 0;
  const auto look = [&] {
    seen = word.load(std::memory_order_seq_cst);
    if (reached(seen, target)) return WaitResult::kReached;
    return interrupted.load(std::memory_order_acquire) != 0 ? WaitResult::kInterrupted : WaitResult::kNothing;
  };
  return sleep_in_slices(deadline, look, [&](int64_t ns) { sleep_while(word, seen, ns); });
}

bool TurnMutex::try_lock_for_ns(int64_t ns) {
  const int64_t until = now_ns() + ns;
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  fence_others();  // see store_and_wake
  bool locked = try_lock();
  for (int64_t left = ns; !locked && left > 0; left = until - now_ns()) {
    sleep_while(word_, kHeld, left);
    locked = try_lock();
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return locked;
}

bool await_turn(Turn &turn, LazyDeadline &deadline) {
  const auto look = [&] { return turn.owns_lock() || turn.try_lock() ? WaitResult::kReached : WaitResult::kNothing; };
  const auto sleep = [&](int64_t ns) {
    if (turn.mutex()->try_lock_for_ns(ns)) turn = Turn(*turn.mutex(), std::adopt_lock);
  };
  return sleep_in_slices(deadline, look, sleep) == WaitResult::kReached;
}

}  // namespace phx
