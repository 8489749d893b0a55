#include "base/wait.h"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace phx {
namespace {

// Yields are free as long as nobody else wants the core. To sleep then would only make it idle, and waking an idle core
// takes long, above all in a virtual machine, whose host gives the core away: two ranks that each wait for the other to
// wake up never get out of it.
constexpr int64_t kPatienceNs = 2 * 1000 * 1000;
constexpr int64_t kWantedNs = 500 * 1000;      // a longer yield than other ranks need for a chunk: a stranger wants it
constexpr int64_t kYieldNs = 100 * 1000;       // then it is left to him sooner
constexpr int64_t kSharedNs = 800;             // a yield that runs nobody takes half of that
constexpr uint32_t kSharedYields = 64;         // until so many in a row were short, the core counts as shared
constexpr int kVainYields = 2;                 // in a row that ran nobody, though the rank waited for is on this core
constexpr int kMoreSpins = 100;                // a few microseconds at most, depending on how long the processor pauses
constexpr int64_t kTurnNs = 2000;              // to switch to another process and back (2.5 us on an EPYC)
constexpr int64_t kSliceNs = 5 * 1000 * 1000;  // bounds how late an interruption is seen by a sleeper
constexpr int64_t kBusySliceNs = 50 * 1000;    // the first one of a rank that must look after other operations as well

// Above 0 if this thread shares its core: it was given away by one of the last yields. Spinning then only delays the
// rank that is waited for, and otherwise it saves a call of the kernel that costs as much as a small collective.
thread_local uint32_t core_is_shared = 0;

// Leaves the core to the writer, which is on it. A scheduler that is fair by time used (EEVDF, Linux 6.6 and later)
// gives a yielded core only to a thread that has had no more of it than the others: a rank that has worked for long
// while this one waited would get it back once this one has burned as much time in yields. No fence is needed: between
// what the writer stores and what it reads lies a switch of threads. If it has moved to another core meanwhile the nap
// may go on to its end.
void nap(const SharedWord &word, uint32_t target, SharedWord &sleepers, int64_t most_ns) {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = word.load(std::memory_order_seq_cst);
  if (!reached(seen, target)) sleep_while(word, seen, most_ns < kSliceNs ? most_ns : kSliceNs);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace

void sleep_while(const SharedWord &word, uint32_t seen, int64_t ns) {
  timespec timeout{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
  // Not FUTEX_PRIVATE: most words lie in memory that other processes share.
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void fence_others() { syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0); }

bool allow_fences() {
  const long known = syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0);
  return known > 0 && (known & MEMBARRIER_CMD_GLOBAL_EXPEDITED) != 0 &&
         syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0 &&
         syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0) == 0;
}

uint32_t current_core() {
  const int core = sched_getcpu();
  return core < 0 ? 0 : static_cast<uint32_t>(core) + 1;
}

void wake_all(const SharedWord &word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

int spins_of_a_turn() {
  // Between 15 and 60 ns each, by processor.
  static const int spins = [] {
    constexpr int kTried = 200;
    const int64_t begin = now_ns();
    for (int i = 0; i < kTried; ++i) cpu_relax();
    const int64_t each = (now_ns() - begin) / kTried;
    return static_cast<int>(kTurnNs / (each < 5 ? 5 : each));
  }();
  return spins < kFewSpins ? kFewSpins : spins;
}

Patience::Patience(int64_t now) : begin_ns_(now), end_ns_(now + kPatienceNs) {}

int64_t Patience::yield(int64_t now) {
  sched_yield();
  const int64_t then = now_ns();
  if (then - now > kSharedNs)
    core_is_shared = kSharedYields;
  else if (core_is_shared > 0)
    --core_is_shared;
  if (then - now > kWantedNs) end_ns_ = begin_ns_ + kYieldNs;
  return then;
}

WaitResult wait_reached_slow(const SharedWord &word, uint32_t target, SharedWord &sleepers,
                             const std::atomic<int32_t> &interrupted, LazyDeadline &deadline,
                             const SharedWord *writer_core) {
  int vain = 0;
  if (is_here(writer_core)) {  // mostly that is all: without a look at the clock
    vain = 1;
    sched_yield();
    if (reached(word.load(std::memory_order_acquire), target)) {
      core_is_shared = kSharedYields;
      return WaitResult::kReached;
    }
  } else if (core_is_shared == 0) {
    for (int i = 0; i < kMoreSpins; ++i) {
      if (reached(word.load(std::memory_order_acquire), target)) return WaitResult::kReached;
      cpu_relax();
    }
  }
  int64_t now = now_ns();
  for (Patience patience(now); !patience.over(now);) {
    if (reached(word.load(std::memory_order_acquire), target)) return WaitResult::kReached;
    if (interrupted.load(std::memory_order_acquire) != 0) break;
    if (now >= deadline.at_ns()) break;
    if (deadline.poll() != LazyDeadline::Elsewhere::kNothing)
      vain = 0;  // other operations are under way, which must be looked after
    const int64_t then = patience.yield(now);
    vain = then - now > kSharedNs ? 0 : vain + 1;
    now = then;
    if (vain >= kVainYields && is_here(writer_core)) {
      nap(word, target, sleepers, deadline.at_ns() - now);
      now = now_ns();
      vain = 0;
    }
  }
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  fence_others();  // see store_and_wake
  const WaitResult result = sleep_until_reached(word, target, interrupted, deadline);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
  return result;
}

WaitResult sleep_until_reached(const SharedWord &word, uint32_t target, const std::atomic<int32_t> &interrupted,
                               LazyDeadline &deadline) {
  WaitResult result = WaitResult::kReached;
  // Nothing wakes this thread when an operation elsewhere can move on, so it looks. Each fruitless look doubles the
  // sleep before the next one: that operation is late by no more than about the time that it has taken already, and a
  // rank that waits long uses no core.
  int64_t busy_slice = kBusySliceNs;
  for (;;) {
    const uint32_t seen = word.load(std::memory_order_seq_cst);
    if (reached(seen, target)) return WaitResult::kReached;
    if (interrupted.load(std::memory_order_acquire) != 0) {
      result = WaitResult::kInterrupted;
      break;
    }
    const int64_t left = deadline.at_ns() - now_ns();
    if (left <= 0 || interrupt_requested()) {
      result = WaitResult::kTimeout;
      break;
    }
    const LazyDeadline::Elsewhere elsewhere = deadline.poll();
    busy_slice = elsewhere == LazyDeadline::Elsewhere::kMoved ? kBusySliceNs : std::min(2 * busy_slice, kSliceNs);
    const int64_t slice = elsewhere == LazyDeadline::Elsewhere::kNothing ? kSliceNs : busy_slice;
    sleep_while(word, seen, std::min(left, slice));
  }
  // One more look: what arrived meanwhile wins over the interruption and the deadline.
  return reached(word.load(std::memory_order_acquire), target) ? WaitResult::kReached : result;
}

}  // namespace phx
