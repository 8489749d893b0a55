// Which of two candidates makes copies for a use of which each is the faster one for a while.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace phx::kernels {

// What fills a slot that lies in the caches of others takes three to eight times as long where cores share no
// third-level cache, and stores that bypass the cache always take the same; and the processors of a virtual machine
// move between the caches of the host, unseen. So now and then the rival makes some copies in a row, since those of one
// call differ, and whoever is faster twice makes the copies from then on. Threads that copy at the same time may lose an
// observation of each other.
class Rivals {
 public:
  struct Turn {
    bool second;  // whether the second candidate makes this copy
    bool tries;   // whether it is the rival's
  };

  Turn next() {
    const uint32_t number = number_.load(std::memory_order_relaxed) + 1;
    number_.store(number, std::memory_order_relaxed);
    const bool tries = static_cast<int32_t>(number - due_.load(std::memory_order_relaxed)) >= 0;
    return {swapped_.load(std::memory_order_relaxed) != tries, tries};
  }

  // `cost`: ticks for 1 KiB.
  void took(Turn turn, uint64_t cost) {
    const uint64_t usual = usual_.load(std::memory_order_relaxed);
    if (!turn.tries) return took_as_usual(usual, cost);
    const uint32_t tried = tried_.load(std::memory_order_relaxed) + 1;
    const uint64_t sum = sum_.load(std::memory_order_relaxed) + cost;
    if (tried < kInARow && cost <= 2 * usual) {
      tried_.store(tried, std::memory_order_relaxed);
      sum_.store(sum, std::memory_order_relaxed);
      return;
    }
    const uint64_t mean = sum / tried;
    const bool wins = mean < usual - usual / 8, swaps = wins && won_.load(std::memory_order_relaxed);
    won_.store(wins && !swaps, std::memory_order_relaxed);
    if (swaps) {
      swapped_.store(turn.second, std::memory_order_relaxed);
      usual_.store(mean, std::memory_order_relaxed);
    }
    try_in(wins && !swaps ? kSoon : cost > 2 * usual ? kTriedRarely : kTriedEvery, 2 * (swaps ? mean : usual));
  }

  void restart() {
    swapped_.store(false, std::memory_order_relaxed);
    usual_.store(0, std::memory_order_relaxed);
    won_.store(false, std::memory_order_relaxed);
    try_in(kSoon, kNotYet);
  }

  // A try is kInARow copies long; less if one of them is hopeless, and then the next one comes late. The others tell how
  // many copies later a try begins: usually, after a hopeless one, and in the beginning or after a win.
  static constexpr uint32_t kInARow = 4, kTriedEvery = 512, kTriedRarely = 4096, kSoon = 8;

 private:
  static constexpr uint64_t kNotYet = UINT64_MAX;

  // A copy in whose middle another thread had the core counts little.
  void took_as_usual(uint64_t usual, uint64_t cost) {
    const uint64_t alarm = alarm_.load(std::memory_order_relaxed);
    const uint64_t weight = alarm == kNotYet ? 4 : 32;
    const uint64_t now = usual == 0 ? cost : (usual * (weight - 1) + std::min(cost, 4 * usual) + weight / 2) / weight;
    usual_.store(now, std::memory_order_relaxed);
    if (now > alarm) try_in(1, kNotYet);
  }
  void try_in(uint32_t copies, uint64_t alarm) {
    due_.store(number_.load(std::memory_order_relaxed) + copies, std::memory_order_relaxed);
    alarm_.store(alarm, std::memory_order_relaxed);
    tried_.store(0, std::memory_order_relaxed);
    sum_.store(0, std::memory_order_relaxed);
  }

  std::atomic<uint32_t> number_{0}, due_{kSoon};  // due_: the number of the copy with which the next try begins
  std::atomic<uint32_t> tried_{0};                // copies of this try,
  std::atomic<uint64_t> sum_{0};                  // and what they took
  std::atomic<bool> swapped_{false}, won_{false};  // won_: the rival, in its last try
  std::atomic<uint64_t> usual_{0};                 // the mean cost of whoever makes the copies
  std::atomic<uint64_t> alarm_{kNotYet};           // the usual cost above which a try begins at once
};

}  // namespace phx::kernels
