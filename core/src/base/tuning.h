// The sizes at which one algorithm takes over from another: built-in values, and a table that `phalanx tune` writes.
#pragma once

#include <cinttypes>
#include <cstdint>
#include <map>
#include <string>

#include "base/error.h"
#include "phalanx/tuning.h"

namespace phx {

// The values of phx_tuning, in bytes. 0: not set.
struct Tuning {
  using Public = phx_tuning;
  uint64_t one_shot_bytes = 0;
  uint64_t chunk_bytes = 0;
  uint64_t streaming_bytes = 0;
  uint64_t push_bytes = 0;
};
// The values of phx_gpu_tuning, in bytes. 0: not set.
struct GpuTuning {
  using Public = phx_gpu_tuning;
  uint64_t line_bytes = 0;
  uint64_t two_shot_bytes = 0;
  uint64_t multicast_bytes = 0;
  uint64_t copy_bytes = 0;
  uint64_t thread_bytes = 0;
};

// One value: its key in the table, its member here and in the struct of the C API, and its allowed range.
template <class Values>
struct TuningField {
  const char *key;
  uint64_t Values::*member;
  uint64_t Values::Public::*shown;
  uint64_t least, most, unit;
};
inline constexpr uint64_t kNeverBytes = uint64_t{1} << 62;  // larger than any memory: as a threshold, never reached
inline constexpr TuningField<Tuning> kTuningFields[] = {
    {"one_shot_bytes", &Tuning::one_shot_bytes, &phx_tuning::one_shot_bytes, 0, kNeverBytes, 1},
    {"chunk_bytes", &Tuning::chunk_bytes, &phx_tuning::chunk_bytes, 4 << 10, 1 << 30, 1},
    {"streaming_bytes", &Tuning::streaming_bytes, &phx_tuning::streaming_bytes, 0, kNeverBytes, 1},
    {"push_bytes", &Tuning::push_bytes, &phx_tuning::push_bytes, 64, 1 << 30, 1}};
inline constexpr TuningField<GpuTuning> kGpuTuningFields[] = {
    {"line_bytes", &GpuTuning::line_bytes, &phx_gpu_tuning::line_bytes, 0, kNeverBytes, 1},
    {"two_shot_bytes", &GpuTuning::two_shot_bytes, &phx_gpu_tuning::two_shot_bytes, 0, kNeverBytes, 1},
    {"multicast_bytes", &GpuTuning::multicast_bytes, &phx_gpu_tuning::multicast_bytes, 0, kNeverBytes, 1},
    {"copy_bytes", &GpuTuning::copy_bytes, &phx_gpu_tuning::copy_bytes, 0, kNeverBytes, 1},
    {"thread_bytes", &GpuTuning::thread_bytes, &phx_gpu_tuning::thread_bytes, 16, 4096, 16}};
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
Values merge_tuning(Values tuning, const Values &base) {
  for (const TuningField<Values> &field : fields_of(&base))
    if (tuning.*field.member == 0) tuning.*field.member = base.*field.member;
  return tuning;
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

template <class Values>
typename Values::Public public_tuning(const Values &tuning) {
  typename Values::Public out{};
  out.struct_size = sizeof out;
  for (const TuningField<Values> &field : fields_of(&tuning)) out.*field.shown = tuning.*field.member;
  return out;
}
template <class Values>
Values private_tuning(const typename Values::Public &values) {
  Values tuning;
  for (const TuningField<Values> &field : fields_of(&tuning)) tuning.*field.member = values.*field.shown;
  return tuning;
}

// What is wrong with the table, for a warning; empty if nothing is, or if there is no table.
std::string tuning_problem();

// $PHALANX_TUNING, else phalanx/tuning in the user's cache directory. Empty when there is none.
std::string tuning_path();

}  // namespace phx
