// The sizes at which one algorithm takes over from another: built-in values, and a table that `phalanx tune` writes.
#pragma once

#include <atomic>
#include <cinttypes>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

#include "base/error.h"
#include "phalanx/tuning.h"

namespace phx {

// In bytes. 0: not set. The caller of the C API has checked the fields struct_size and flags, which nothing else reads.
using Tuning = phx_tuning;
using GpuTuning = phx_gpu_tuning;

// One value: its key in the table, its member, and its allowed range.
template <class Values>
struct TuningField {
  const char *key;
  uint64_t Values::*member;
  uint64_t least, most, unit;
};
inline constexpr uint64_t kNeverBytes = uint64_t{1} << 62;  // larger than any memory: as a threshold, never reached
inline constexpr TuningField<Tuning> kTuningFields[] = {
    {"one_shot_bytes", &Tuning::one_shot_bytes, 0, kNeverBytes, 1},
    {"chunk_bytes", &Tuning::chunk_bytes, 4 << 10, 1 << 30, 1},
    {"streaming_bytes", &Tuning::streaming_bytes, 0, kNeverBytes, 1},
    {"push_bytes", &Tuning::push_bytes, 64, 1 << 30, 1}};
inline constexpr TuningField<GpuTuning> kGpuTuningFields[] = {
    {"line_bytes", &GpuTuning::line_bytes, 0, kNeverBytes, 1},
    {"two_shot_bytes", &GpuTuning::two_shot_bytes, 0, kNeverBytes, 1},
    {"multicast_bytes", &GpuTuning::multicast_bytes, 0, kNeverBytes, 1},
    {"copy_bytes", &GpuTuning::copy_bytes, 0, kNeverBytes, 1},
    {"thread_bytes", &GpuTuning::thread_bytes, 16, 4096, 16}};
inline constexpr auto &fields_of(const Tuning *) { return kTuningFields; }
inline constexpr auto &fields_of(const GpuTuning *) { return kGpuTuningFields; }

// Selects the row of the table for a group on GPUs.
struct GpuPlace {
  std::string gpu;  // the driver's name for it
  int group_size = 0;
  bool shared = false;  // whether ranks share a GPU
};

// `cores`: how many cores the ranks of the group may use together.
Tuning builtin_tuning(int group_size, int cores);
GpuTuning builtin_gpu_tuning(int group_size);
// What rows for this host have after "host=": by its name and its processor, because several hosts may share a home
// directory and so the table.
const std::string &tuning_host();
// The table's row for this host and group size, or for `place`; fields that it lacks are 0. Never fails: a table that
// cannot be read counts as empty.
Tuning load_tuning(int group_size);
GpuTuning load_gpu_tuning(const GpuPlace &place);
// Replaces or adds the row in the table at `path`; an empty path means tuning_path().
phx_status save_tuning(const std::string &path, int group_size, const Tuning &tuning);
phx_status save_gpu_tuning(const std::string &path, const GpuPlace &place, const GpuTuning &tuning);

// `tuning`, with the values of `base` in place of zeros.
template <class Values>
Values merge_tuning(const Values &tuning, Values base) {
  for (const TuningField<Values> &field : fields_of(&tuning))
    if (tuning.*field.member != 0) base.*field.member = tuning.*field.member;
  return base;
}

// Fails if a value from a caller or a peer is not allowed.
template <class Values>
phx_status check_tuning(const char *operation, const Values &tuning) {
  for (const TuningField<Values> &field : fields_of(&tuning)) {
    const uint64_t value = tuning.*field.member;
    if (value >= field.least && value <= field.most && value % field.unit == 0) continue;
    const std::string step = field.unit == 1 ? "" : ", a multiple of " + std::to_string(field.unit);
    return fail(PHX_ERR_INVALID, operation, "%s is %" PRIu64 "; expected %" PRIu64 " to %" PRIu64 "%s", field.key,
                value, field.least, field.most, step.c_str());
  }
  return PHX_OK;
}

// Values that a group has agreed on, and which can be replaced while calls read them.
template <class Values>
class Published {
 public:
  void publish(const Values &values) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.push_back(values);
    current_.store(&all_.back(), std::memory_order_release);
  }
  const Values &get() const { return *current_.load(std::memory_order_acquire); }

 private:
  std::mutex mutex_;
  std::deque<Values> all_;  // never shrinks: readers take no lock
  std::atomic<const Values *> current_{nullptr};
};

// What is wrong with the table, for a warning; empty if nothing is, or if there is no table.
std::string tuning_problem();

// $PHALANX_TUNING, else phalanx/tuning in the user's cache directory. Empty when there is none.
std::string tuning_path();

}  // namespace phx
