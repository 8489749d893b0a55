// The flight recorder of one channel of one rank: its last collectives, in shared memory, so that peers can read it
// when the rank is stuck or dead.
//
// One writer. A reader never waits: an entry that changes while it is read is skipped.
#pragma once

#include <atomic>
#include <cstring>

#include "base/ticks.h"
#include "group/control.h"

namespace phx {

struct Recorded {
  uint64_t sequence = 0;
  CallRecord call;
  uint64_t start_ticks = 0;
  uint64_t end_ticks = 0;  // 0: not complete
  phx_status status = PHX_IN_PROGRESS;
};

class alignas(kLine) HistoryEntry {
 public:
  void begin(uint64_t sequence, const CallRecord &call) {
    uint64_t words[3];
    static_assert(sizeof words == sizeof call);
    std::memcpy(words, &call, sizeof words);
    sequence_.store(0, std::memory_order_relaxed);
    // release: a reader that sees any of these values sees the 0 as well.
    for (int i = 0; i < 3; ++i) call_[i].store(words[i], std::memory_order_release);
    start_.store(ticks(), std::memory_order_release);
    end_.store(0, std::memory_order_release);
    sequence_.store(sequence, std::memory_order_release);
  }
  void end(uint64_t sequence, phx_status status) {
    if (sequence_.load(std::memory_order_relaxed) != sequence) return;  // overwritten by a later call
    status_.store(status, std::memory_order_relaxed);
    end_.store(ticks(), std::memory_order_release);
  }
  bool read(Recorded *out) const {
    out->sequence = sequence_.load(std::memory_order_acquire);
    uint64_t words[3];
    for (int i = 0; i < 3; ++i) words[i] = call_[i].load(std::memory_order_acquire);
    std::memcpy(&out->call, words, sizeof words);
    out->start_ticks = start_.load(std::memory_order_acquire);
    out->end_ticks = end_.load(std::memory_order_acquire);
    out->status = out->end_ticks == 0 ? PHX_IN_PROGRESS : status_.load(std::memory_order_relaxed);
    return out->sequence != 0 && sequence_.load(std::memory_order_relaxed) == out->sequence;
  }

 private:
  std::atomic<uint64_t> sequence_;  // 0 while the rest is written
  std::atomic<uint64_t> call_[3];
  std::atomic<uint64_t> start_, end_;
  std::atomic<int32_t> status_;  // valid once end_ is set
};
static_assert(sizeof(HistoryEntry) == kLine && std::atomic<uint64_t>::is_always_lock_free);

class History {
 public:
  History() = default;
  History(void *entries, uint32_t count) : entries_(static_cast<HistoryEntry *>(entries)), count_(count) {}
#ifdef PHX_UNRECORDED  // only to measure what the recorder costs: benchmarks/detection_cost.py
  void begin(uint64_t, const CallRecord &) {}
  void end(uint64_t, phx_status) {}
#else
  void begin(uint64_t sequence, const CallRecord &call) { at(sequence).begin(sequence, call); }
  void end(uint64_t sequence, phx_status status) { at(sequence).end(sequence, status); }
#endif
  uint32_t count() const { return count_; }
  bool read(uint32_t index, Recorded *out) const { return entries_[index].read(out); }
  // The entry with the highest sequence number, which is 0 if there is none.
  Recorded newest() const {
    Recorded newest, entry;
    for (uint32_t i = 0; i < count_; ++i)
      if (read(i, &entry) && entry.sequence > newest.sequence) newest = entry;
    return newest;
  }

 private:
  HistoryEntry &at(uint64_t sequence) const { return entries_[sequence & (count_ - 1)]; }
  HistoryEntry *entries_ = nullptr;
  uint32_t count_ = 0;  // a power of two
};

}  // namespace phx
