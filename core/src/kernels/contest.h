// Which of several candidates makes the copies of one kind: whichever is the fastest at the moment.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace phx::kernels {

struct ContestRules {
  uint32_t soon = 7;      // in the beginning and after a win, a try comes after so many copies
  uint32_t early = 12;    // so many tries are the beginning
  uint32_t skipped = 0;   // the first copies of a try, which do not count
  uint32_t margin = 5;    // a candidate is faster if it takes less by 1 / 2^margin,
  uint32_t hopeless = 0;  // and hopeless if one of its copies takes more by 1 / 2^hopeless
};

// How long a store takes depends on who has the line, and what is fastest on one machine is slow on the next one. It
// changes on one machine, too: between cores that share no third-level cache some stores into a line that others have
// read take three to eight times as long, and the processors of a virtual machine move between the caches of the host,
// unseen. So the copies themselves are measured. Now and then another candidate makes some of them in a row, since
// those of one call differ, and one that is faster twice makes the copies from then on.
//
// Threads that copy at the same time may lose an observation of each other.
class Contest {
 public:
  struct Turn {
    uint8_t candidate;  // the number of the one that makes this copy
    bool tries;         // it is not the one that usually does
    bool is_timed;      // `took` wants to know
  };

  explicit constexpr Contest(const ContestRules &rules = ContestRules())
      : rules_(rules), due_(rules.soon), early_(rules.early) {}

  // Before the first copy.
  void set_margin(uint32_t margin) { rules_.margin = margin; }

  // The candidate that has won; `first` if none has.
  uint8_t winner(uint8_t first) const {
    const uint8_t current = current_.load(std::memory_order_relaxed);
    return current == kNone ? first : current;
  }

  // The candidates are the bits of `candidates`. `first` makes the copies until another one has proved to be faster.
  Turn next(uint32_t candidates, uint8_t first) {
    const uint32_t number = number_.load(std::memory_order_relaxed) + 1;
    number_.store(number, std::memory_order_relaxed);
    const uint8_t current = current_.load(std::memory_order_relaxed), usual = current == kNone ? first : current;
    if (static_cast<int32_t>(number - due_.load(std::memory_order_relaxed)) < 0)
      return {usual, false, number % kTimedEvery == 0 || early_.load(std::memory_order_relaxed) != 0};
    uint8_t rival = rival_.load(std::memory_order_relaxed);
    if (rival == kNone || rival == usual || (candidates >> rival & 1) == 0) rival = after(usual, candidates, usual);
    rival_.store(rival, std::memory_order_relaxed);
    return {rival, rival != usual, true};
  }

  // `cost`: ticks for 1 KiB. The other arguments are those of `next`.
  void took(Turn turn, uint64_t cost, uint32_t candidates) {
    const uint64_t usual = usual_.load(std::memory_order_relaxed);
    if (!turn.tries) return took_as_usual(usual, cost);
    const uint32_t tried = tried_.load(std::memory_order_relaxed) + 1;
    const bool counts = tried > rules_.skipped;
    const bool hopeless = counts && cost > usual + (usual >> rules_.hopeless);
    const uint64_t sum = sum_.load(std::memory_order_relaxed) + (counts ? cost : 0);
    if (tried < kInARow && !hopeless) {
      tried_.store(tried, std::memory_order_relaxed);
      sum_.store(sum, std::memory_order_relaxed);
      return;
    }
    const uint64_t mean = sum / (tried - rules_.skipped);
    const bool wins = mean < usual - (usual >> rules_.margin),
               wins_again = wins && won_.load(std::memory_order_relaxed);
    const uint32_t early = early_.load(std::memory_order_relaxed);
    won_.store(wins && !wins_again, std::memory_order_relaxed);
    if (wins && !wins_again) return try_in(rules_.soon, 2 * usual, early);
    if (wins_again) {
      current_.store(turn.candidate, std::memory_order_relaxed);
      usual_.store(mean, std::memory_order_relaxed);
    }
    // The next one in turn, which is not the one that makes the copies.
    const uint8_t current = wins_again ? turn.candidate : current_.load(std::memory_order_relaxed);
    rival_.store(after(turn.candidate, candidates, current), std::memory_order_relaxed);
    const uint32_t pause = early > 1 ? rules_.soon : hopeless ? kTriedRarely : kTriedEvery;
    try_in(pause, 2 * (wins_again ? mean : usual), early > 0 ? early - 1 : 0);
  }

  // A try is kInARow copies long; less if one of them is hopeless. The others tell how many copies later the next one
  // begins: usually, and after a hopeless one. One of kTimedEvery usual copies is timed. These are primes, so
  // that calls which make a few copies of different kinds do not meet a try with always the same one.
  static constexpr uint32_t kInARow = 4, kTriedEvery = 2039, kTriedRarely = 4093, kTimedEvery = 13;

 private:
  static constexpr uint64_t kNever = UINT64_MAX;
  static constexpr uint8_t kNone = 255;

  static uint8_t after(uint8_t candidate, uint32_t candidates, uint8_t but) {
    for (uint32_t i = 1; i < 32; ++i) {
      const uint8_t next = static_cast<uint8_t>((candidate + i) % 32);
      if ((candidates >> next & 1) != 0 && next != but) return next;
    }
    return candidate;
  }
  // A copy in whose middle another thread had the core counts little.
  void took_as_usual(uint64_t usual, uint64_t cost) {
    const uint64_t weight = early_.load(std::memory_order_relaxed) != 0 ? 4 : 16;
    const uint64_t now = usual == 0 ? cost : (usual * (weight - 1) + std::min(cost, 4 * usual) + weight / 2) / weight;
    usual_.store(now, std::memory_order_relaxed);
    if (now > alarm_.load(std::memory_order_relaxed)) try_in(1, kNever, rules_.early);
  }
  void try_in(uint32_t copies, uint64_t alarm, uint32_t early) {
    due_.store(number_.load(std::memory_order_relaxed) + copies, std::memory_order_relaxed);
    alarm_.store(alarm, std::memory_order_relaxed);
    early_.store(early, std::memory_order_relaxed);
    tried_.store(0, std::memory_order_relaxed);
    sum_.store(0, std::memory_order_relaxed);
  }

  ContestRules rules_;
  std::atomic<uint32_t> number_{0}, due_;  // due_: the number of the copy with which the next try begins
  std::atomic<uint8_t> current_{kNone};    // who makes the copies
  std::atomic<uint8_t> rival_{kNone};      // who makes or made the last try
  std::atomic<bool> won_{false};           // the rival, in its last try
  std::atomic<uint32_t> early_;            // tries that still come soon
  std::atomic<uint32_t> tried_{0};         // copies of this try,
  std::atomic<uint64_t> sum_{0};           // and what they took
  std::atomic<uint64_t> usual_{0};         // the mean cost of the usual copies
  std::atomic<uint64_t> alarm_{kNever};    // the usual cost above which a try begins at once
};

}  // namespace phx::kernels
