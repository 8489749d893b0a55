#include "group/measure_copies.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "base/deadline.h"
#include "base/wait.h"
#include "kernels/kernels.h"

namespace phx {
namespace {

using kernels::Copy;
using kernels::copy_class;
using kernels::CopyPlan;
using kernels::CopyUse;

constexpr int64_t kMsNs = 1000000;
constexpr int64_t kFollowMs = 20;  // how long a rank waits for the other one, which may come later
constexpr uint32_t kChunks = 5;    // of a trial; the first two bring the caches into the state that the trial leaves
constexpr uint32_t kUntimed = 2;
constexpr double kGain = 0.9;      // what replaces the choice by features must take less than this part of its time
constexpr double kHopeless = 1.6;  // what takes this much longer than the best in the first round is not tried again
constexpr int kRounds = 8;  // if time allows
constexpr size_t kPage = 4096;
constexpr double kNever = 1e30;

constexpr uint32_t kOver = uint32_t{1} << 30;  // in place of the number of a trial: there will be no more

struct Trial {
  Copy put, read;
  size_t bytes;
};

// Lies at the beginning of the third slot. Counters only grow.
struct Board {
  alignas(64) std::atomic<uint32_t> present;  // 1: the other rank has come
  std::atomic<uint32_t> trials;               // released after `trial` is written
  Trial trial;
  alignas(64) std::atomic<uint32_t> of_leader;  // chunks that rank 0 has done; pairs with the acquire of the other
  alignas(64) std::atomic<uint32_t> of_follower;
};

class Measuring {
 public:
  Measuring(char *const slots[3], bool leads)
      : slots_{slots[0], slots[1]},
        board_(*reinterpret_cast<Board *>(slots[2])),
        leads_(leads),
        mine_(leads ? board_.of_leader : board_.of_follower),
        theirs_(leads ? board_.of_follower : board_.of_leader),
        end_ns_(now_ns() + kFollowMs * kMsNs),
        memory_(2 * kMeasuredSlotBytes + kPage, 1),
        source_(memory_.data() + kPage - reinterpret_cast<uintptr_t>(memory_.data()) % kPage),
        out_(source_ + kMeasuredSlotBytes) {}

  bool lead(CopyPlan *plan) {
    bool any = await(board_.present, 1);
    end_ns_ = now_ns() + kMeasureCopiesMs * kMsNs;
    any = any && choose(plan);
    board_.trials.store(kOver, std::memory_order_release);
    return any;
  }

  void follow() {
    board_.present.store(1, std::memory_order_release);
    while (await(board_.trials, ++trials_)) {
      if (is_over()) return;
      const Trial trial = board_.trial;
      if (!run(trial)) return;
    }
  }

 private:
  struct Option {
    Copy copy;
    double ns = kNever;
  };

  bool is_over() const { return board_.trials.load(std::memory_order_acquire) == kOver; }

  bool await(const std::atomic<uint32_t> &word, uint32_t target) const {
    for (uint32_t spins = 1; !reached(word.load(std::memory_order_acquire), target); ++spins) {
      cpu_relax();
      if (spins % 64 != 0) continue;
      if (now_ns() >= end_ns_ || (!leads_ && is_over())) return false;
      sched_yield();  // in case both ranks are on one core
    }
    return true;
  }

  // Does this rank's part. False once the time is over.
  bool run(const Trial &trial) {
    const uint32_t before = done_;
    done_ += kChunks;
    for (uint32_t i = 0; i < kChunks; ++i) {
      if (i == kUntimed) begin_ns_ = now_ns();
      const uint32_t needed = leads_ ? (i < 2 ? 0 : i - 1) : i + 1;  // the writer fills a slot once it has been read
      if (!await(theirs_, before + needed)) return false;
      if (leads_)
        kernels::copy_with(trial.put, slots_[i % 2], source_, trial.bytes);
      else
        kernels::copy_with(trial.read, out_, slots_[i % 2], trial.bytes);
      mine_.store(before + i + 1, std::memory_order_release);
    }
    return !leads_ || await(theirs_, done_);
  }

  // The time of the timed chunks; kNever once the time is over.
  double time(const Trial &trial) {
    if (now_ns() >= end_ns_) return kNever;
    board_.trial = trial;
    board_.trials.store(++trials_, std::memory_order_release);
    return run(trial) ? static_cast<double>(now_ns() - begin_ns_) : kNever;
  }

  // Times what may serve `use` for copies of `bytes`, in turns, and writes the best to `*chosen` if it is clearly
  // better. `trial_of` makes the trial of a candidate. False if not even two rounds were possible in this part of the
  // time.
  template <class TrialOf>
  bool settle(CopyUse use, size_t bytes, double part, Copy *chosen, const TrialOf &trial_of) {
    const int64_t until = now_ns() + static_cast<int64_t>(part * static_cast<double>(kMeasureCopiesMs * kMsNs));
    std::vector<Option> options{{*chosen}};
    for (size_t i = 0; i < kernels::kCopyCount; ++i) {
      const Copy copy = static_cast<Copy>(i);
      const bool is_other_again = copy == Copy::kMemcpy && copy_class(bytes) != 0;  // large ones are loops or a string
      if (copy != *chosen && !is_other_again && kernels::copy_is_for(copy, use)) options.push_back({copy});
    }
    if (options.size() < 2) return false;
    int rounds = 0;
    double best = kNever;
    for (; rounds < kRounds && (rounds < 2 || now_ns() < until); ++rounds) {
      for (Option &option : options) {
        if (&option != options.data() && option.ns > kHopeless * best) continue;
        const double ns = time(trial_of(option.copy));
        if (ns == kNever) return false;
        option.ns = std::min(option.ns, ns);
      }
      for (const Option &option : options) best = std::min(best, option.ns);
    }
    const Option &first = options.front();
    const Option &fastest =
        *std::min_element(options.begin(), options.end(), [](const Option &a, const Option &b) { return a.ns < b.ns; });
    if (fastest.ns < kGain * first.ns) *chosen = fastest.copy;
    return true;
  }

  // The sizes of most chunks come first.
  bool choose(CopyPlan *plan) {
    constexpr size_t kMany = size_t{128} << 10, kFew = size_t{32} << 10;
    Copy &many = plan->at(CopyUse::kAny, copy_class(kMany)), &few = plan->at(CopyUse::kAny, copy_class(kFew));
    Copy &put_many = plan->at(CopyUse::kPutOneWay, copy_class(kMany));
    Copy &put_few = plan->at(CopyUse::kPutOneWay, copy_class(kFew));
    Copy &read = plan->at(CopyUse::kReadOneWay, copy_class(kMany));
    bool any = settle(CopyUse::kAny, kMany, 0.25, &many, [&](Copy c) { return Trial{c, c, kMany}; });
    any |= settle(CopyUse::kPutOneWay, kMany, 0.3, &put_many, [&](Copy c) {
      return Trial{c, many, kMany};
    });
    any |= settle(CopyUse::kReadOneWay, kMany, 0.2, &read, [&](Copy c) {
      return Trial{put_many, c, kMany};
    });
    any |= settle(CopyUse::kAny, kFew, 0.1, &few, [&](Copy c) { return Trial{c, c, kFew}; });
    any |= settle(CopyUse::kPutOneWay, kFew, 0.15, &put_few, [&](Copy c) {
      return Trial{c, few, kFew};
    });
    const size_t last = kernels::kCopyClasses - 1;
    plan->at(CopyUse::kAny, last) = many;
    plan->at(CopyUse::kPutOneWay, last) = put_many;
    for (size_t i = 1; i <= last; ++i) plan->at(CopyUse::kReadOneWay, i) = read;
    return any;
  }

  char *const slots_[2];
  Board &board_;
  const bool leads_;
  std::atomic<uint32_t> &mine_;
  const std::atomic<uint32_t> &theirs_;
  int64_t end_ns_;
  // Both begin a page, as large tensors do: some stores make loads from the same offset in another page wait.
  std::vector<char> memory_;
  char *const source_, *const out_;
  uint32_t trials_ = 0, done_ = 0;
  int64_t begin_ns_ = 0;
};

}  // namespace

bool measure_copies(char *const slots[3], bool leads, CopyPlan *out) {
  Measuring measuring(slots, leads);
  if (leads) return measuring.lead(out);
  measuring.follow();
  return false;
}

}  // namespace phx
