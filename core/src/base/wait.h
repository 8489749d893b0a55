// All waiting: a thread spins briefly, then yields, then sleeps in slices. Most waits are for a word of another rank.
//
// A waiter with idle cores sees the word within a cache-line transfer; with more ranks than cores the yields hand the
// core to the rank that is waited for; and a rank that waits long uses almost no core time. Sleeping waiters announce
// themselves in a `sleepers` word, so that a writer pays for a wake-up call only when a thread sleeps.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/deadline.h"
#include "base/progress.h"

namespace phx {

using SharedWord = std::atomic<uint32_t>;
static_assert(sizeof(SharedWord) == 4 && SharedWord::is_always_lock_free);

// a >= b on a counter that wraps around.
inline bool reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A deadline that reads the clock only in a long wait, and can advance the rank's other operations meanwhile.
class LazyDeadline {
 public:
  // `caller` is the source that waits, which is not polled. A negative `ms` means that the time is over already: the
  // caller has measured it, and errors name -ms.
  explicit LazyDeadline(int64_t ms, Progress *progress = nullptr, const ProgressSource *caller = nullptr)
      : ms_(ms), progress_(progress), caller_(caller) {}
  explicit LazyDeadline(const Deadline &deadline, Progress *progress)
      : ms_(deadline.budget_ms()), at_ns_(deadline.at_ns()), progress_(progress), caller_(nullptr) {}
  enum class Elsewhere { kNothing, kWaits, kMoved };
  // Advances the other pending operations of this rank. Returns whether there were any, and whether one advanced.
  Elsewhere poll() const {
    if (progress_ == nullptr || !progress_->pending()) return Elsewhere::kNothing;
    return progress_->poll(caller_) ? Elsewhere::kMoved : Elsewhere::kWaits;
  }
  int64_t budget_ms() const { return ms_ < 0 ? -ms_ : ms_; }
  // What the log says where a wait with this deadline becomes long; nothing without it.
  void set_text(const WaitText &text) { text_ = text; }
  const WaitText &text() const { return text_; }
  int64_t at_ns() {
    if (at_ns_ == 0) at_ns_ = Deadline::after_ms(ms_).at_ns();
    return at_ns_;
  }

 private:
  int64_t ms_;
  int64_t at_ns_ = 0;
  Progress *progress_;
  const ProgressSource *caller_;
  WaitText text_;
};

// How a wait ended, or what one call of `look` found. kNothing and kMoved do not end a wait; kMoved means that this
// thread has advanced an operation without completing it. kMismatch is a result only of Lane::await, which compares the
// calls of the ranks.
enum class WaitResult { kReached, kInterrupted, kTimeout, kNothing, kMoved, kMismatch };

// The part of a wait that follows the first spins: it yields between calls of `look` for 2 ms, but not where other
// programs want the core, and then sleeps between them.
class Waiter {
 public:
  explicit Waiter(LazyDeadline &deadline, int fruitless_yields = 0)
      : deadline_(deadline), fruitless_yields_(fruitless_yields) {
    restart();
  }

  // Calls `look` until it, or `sleep`, returns a result that ends the wait. `sleep` returns when that may happen.
  template <class Look, class Sleep>
  WaitResult wait(Look look, Sleep sleep) {
    for (;;) {
      WaitResult seen = look();
      const bool yielded_enough = now_ >= sleep_at_ns_;
      const bool sleeps = seen == WaitResult::kNothing && yielded_enough && left_ns() > 0;
      if (sleeps) {
        seen = sleep();
        slept();
      }
      if (seen != WaitResult::kNothing && seen != WaitResult::kMoved) return seen;
      if (left_ns() <= 0) return WaitResult::kTimeout;
      if ((yielded_enough || seen == WaitResult::kMoved) && interrupt_requested()) return WaitResult::kTimeout;
      if (seen == WaitResult::kMoved)
        restart();
      else if (!sleeps)
        yield();
    }
  }

  int64_t left_ns() { return deadline_.at_ns() - now_; }
  // The number of consecutive yields that ran no other thread, while this rank had no other pending operations.
  int fruitless_yields() const { return fruitless_yields_; }
  // A `look` that has slept must call this.
  void slept() {
    now_ = now_ns();
    fruitless_yields_ = 0;
  }

 private:
  void restart();
  void yield();

  LazyDeadline &deadline_;
  int64_t sleep_at_ns_ = 0;
  int64_t now_ = 0;  // when the clock was last read
  int fruitless_yields_;
};

// The last part of a wait: calls `look` and `sleep` in turn. `sleep` sleeps for at most the time that it is passed.
//
// Nothing wakes this thread when another pending operation of this rank can advance, so it polls between slices. Each
// poll without progress doubles the next slice, up to 5 ms: an operation is late by at most about the time that it has
// taken already, and a rank that waits long uses almost no core time.
template <class Look, class Sleep>
WaitResult sleep_in_slices(LazyDeadline &deadline, Look look, Sleep sleep) {
  constexpr int64_t kSliceNs = 5 * 1000 * 1000;  // bounds how late an interruption is seen
  constexpr int64_t kBusySliceNs = 50 * 1000;    // the first slice while other operations are pending
  int64_t busy_slice = kBusySliceNs;
  for (;;) {
    const WaitResult seen = look();
    if (seen == WaitResult::kReached) return seen;
    const int64_t left = deadline.at_ns() - now_ns();
    if (seen == WaitResult::kInterrupted || left <= 0 || interrupt_requested()) {
      // A value that arrived meanwhile wins over the interruption and the deadline.
      if (look() == WaitResult::kReached) return WaitResult::kReached;
      return seen == WaitResult::kInterrupted ? seen : WaitResult::kTimeout;
    }
    const LazyDeadline::Elsewhere elsewhere = deadline.poll();
    busy_slice = elsewhere == LazyDeadline::Elsewhere::kMoved ? kBusySliceNs : std::min(2 * busy_slice, kSliceNs);
    sleep(std::min(left, elsewhere == LazyDeadline::Elsewhere::kNothing ? kSliceNs : busy_slice));
  }
}

// Growing pauses between polls of something that cannot wake this thread, such as a file.
class Backoff {
 public:
  Backoff(int64_t first_us, int64_t longest_us) : next_ns_(first_us * 1000), longest_ns_(longest_us * 1000) {}
  void pause(const Deadline &deadline);  // never past the deadline
  // Pauses until `ready` returns true. Returns false if the deadline passes first.
  template <class Ready>
  bool until(const Deadline &deadline, Ready ready) {
    for (; !ready(); pause(deadline))
      if (deadline.passed()) return false;
    return true;
  }

 private:
  int64_t next_ns_;
  int64_t longest_ns_;
};

// Waits until `word` reaches `target`. `interrupted`, a flag of this process, ends the wait early unless the target is
// reached. The writer of `word` reads `sleepers` to see whether it must wake a thread. The acquire load pairs with the
// writer's release (or stronger) store: what it wrote before is visible on kReached. writer_core: the core that the
// writer last ran on (current_core), or NULL if unknown.
WaitResult wait_reached_slow(const SharedWord &word, uint32_t target, SharedWord &sleepers,
                             const std::atomic<int32_t> &interrupted, LazyDeadline &deadline,
                             const SharedWord *writer_core);

// The core that this thread runs on, counted from 1; 0 if unknown.
uint32_t current_core();

// Whether the writer last reported the core that this thread runs on. Then it cannot write while this thread spins.
inline bool runs_on_this_core(const SharedWord *writer_core) {
  if (writer_core == nullptr) return false;
  const uint32_t core = writer_core->load(std::memory_order_relaxed);
  return core != 0 && core == current_core();
}

// Sleeps without spinning or yielding first. The caller has incremented `sleepers` and passed a fence (store_and_wake).
WaitResult sleep_until_reached(const SharedWord &word, uint32_t target, const std::atomic<int32_t> &interrupted,
                               LazyDeadline &deadline);

// Spins before the first yield: 0.25 to 1 us. This is best with busy cores; a waiter with a core of its own spins more.
inline constexpr int kFewSpins = 20;
// The number of spins that take about as long as yielding the core and getting it back. For a rank that shares its core
// with ranks that have arrived already: they would only yield the core back, which takes longer.
int spins_of_a_turn();

inline WaitResult wait_reached(const SharedWord &word, uint32_t target, SharedWord &sleepers,
                               const std::atomic<int32_t> &interrupted, LazyDeadline &deadline,
                               const SharedWord *writer_core = nullptr, int spins = kFewSpins) {
  for (int i = 0; i < spins; ++i) {
    if (reached(word.load(std::memory_order_acquire), target)) return WaitResult::kReached;
    if (i == 0 && runs_on_this_core(writer_core)) break;
    cpu_relax();
  }
  return wait_reached_slow(word, target, sleepers, interrupted, deadline, writer_core);
}

// Sleeps until wake_all, for at most `ns`, if `word` equals `seen`. May return early, so the caller checks again.
void sleep_while(const SharedWord &word, uint32_t seen, int64_t ns);
void wake_all(const SharedWord &word);

// Registers this process for the fences of others (membarrier). False if the kernel or the container lacks them.
bool allow_fences();
extern std::atomic<bool> fences_allowed;  // by the last call of allow_fences
inline bool fences_are_allowed() { return fences_allowed.load(std::memory_order_relaxed); }
// Every thread of every registered process passes a full fence between the call and the return.
void fence_others();

// Stores `value` and wakes the sleepers. The store must come before the load of `sleepers` (Dekker's algorithm with
// wait_reached_slow, which increments `sleepers` and then reads the word again). A full fence here would wait, in every
// collective, until this rank owns every cache line that it has written. So where all ranks allow it
// (`fenced_by_sleepers`), the rank that goes to sleep, which has time, fences the others instead.
inline void store_and_wake(SharedWord &word, uint32_t value, const SharedWord &sleepers, bool fenced_by_sleepers) {
  if (fenced_by_sleepers) {
    word.store(value, std::memory_order_release);
    std::atomic_signal_fence(std::memory_order_seq_cst);  // orders the compiler; the sleeper's fence orders the core
    if (sleepers.load(std::memory_order_relaxed) != 0) wake_all(word);
    return;
  }
  word.exchange(value, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) wake_all(word);
}

// ---- turns: locks whose holder may wait for its peers while it holds them, so the next thread waits only until its
// own deadline

// A mutex whose wait can end at a time of the monotonic clock. Its functions are inline, because every collective
// locks and unlocks it: std::timed_mutex costs twice as much there. Unlocking takes no locked instruction
// (store_and_wake).
class TurnMutex {
 public:
  // Pairs with the release in unlock(): what the last holder wrote is visible.
  bool try_lock() {
    uint32_t expected = kFree;
    return word_.compare_exchange_strong(expected, kHeld, std::memory_order_acquire, std::memory_order_relaxed);
  }
  bool try_lock_for_ns(int64_t ns);
  void lock() {
    while (!try_lock() && !try_lock_for_ns(1000000000)) {
    }
  }
  void unlock() { store_and_wake(word_, kFree, sleepers_, fences_are_allowed()); }

 private:
  static constexpr uint32_t kFree = 0, kHeld = 1;
  SharedWord word_{kFree}, sleepers_{0};
};
using Turn = std::unique_lock<TurnMutex>;

// The slow path of take_turn, for a lock that is held.
bool await_turn(Turn &turn, LazyDeadline &deadline);

// Locks `turn`, which is deferred, and advances pending operations of this rank while it waits. False at the deadline.
// Taking a free lock does not read the clock.
inline bool take_turn(Turn &turn, LazyDeadline &deadline) { return turn.try_lock() || await_turn(turn, deadline); }

}  // namespace phx
