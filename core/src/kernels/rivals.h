// Which of two candidates makes copies for a use of which each is the faster one for a while.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace phx::kernels {

// What fills a slot that lies in the caches of others takes three to eight times as long where cores share no
// third-level cache, and stores that bypass the cache always take the same; and the processors of a virtual machine
// move between the caches of the host, unseen. So every kTriedEvery-th copy is made by the rival, and whoever is
// clearly faster twice makes the copies from then on. Threads that copy at the same time may lose an observation of
// each other.
class Rivals {
 public:
  struct Turn {
    bool second;  // whether the second candidate makes this copy
    bool tries;   // whether it is the rival's
  };

  Turn next() {
    const uint32_t number = number_.load(std::memory_order_relaxed) + 1;
    number_.store(number, std::memory_order_relaxed);
    const bool tries = number % kTriedEvery == 0;
    return {swapped_.load(std::memory_order_relaxed) != tries, tries};
  }

  // `cost`: ticks for 1 KiB.
  void took(Turn turn, uint64_t cost) {
    const uint64_t usual = usual_.load(std::memory_order_relaxed);
    if (!turn.tries) {
      // A copy in whose middle another thread had the core counts little.
      usual_.store(usual == 0 || cost < usual ? cost : usual + (std::min(cost, 4 * usual) - usual) / 16 + 1,
                   std::memory_order_relaxed);
      return;
    }
    const bool wins = cost < usual / 4 * 3;
    const uint32_t wins_before = wins_.load(std::memory_order_relaxed);
    wins_.store(wins ? wins_before + 1 : 0, std::memory_order_relaxed);
    if (!wins || wins_before == 0) return;
    swapped_.store(turn.second, std::memory_order_relaxed);
    usual_.store(cost, std::memory_order_relaxed);
    wins_.store(0, std::memory_order_relaxed);
  }

  void restart() {
    swapped_.store(false, std::memory_order_relaxed);
    usual_.store(0, std::memory_order_relaxed);
    wins_.store(0, std::memory_order_relaxed);
  }

  static constexpr uint32_t kTriedEvery = 256;

 private:
  std::atomic<uint32_t> number_{0}, wins_{0};  // wins_: of the rival, without one of the other between them
  std::atomic<bool> swapped_{false};
  std::atomic<uint64_t> usual_{0};  // of whoever makes the copies
};

}  // namespace phx::kernels
