// Where one algorithm takes over from another: built-in values, and a table that `phalanx tune` has written.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"
#include "phalanx/tuning.h"

namespace phx {

// What the values of phx_tuning mean, in bytes.
struct Tuning {
  uint64_t one_shot_bytes = 0;
  uint64_t chunk_bytes = 0;
  uint64_t streaming_bytes = 0;
  uint64_t push_bytes = 0;
};
// And those of phx_gpu_tuning.
struct GpuTuning {
  uint64_t line_bytes = 0;
  uint64_t two_shot_bytes = 0;
  uint64_t multicast_bytes = 0;
  uint64_t copy_bytes = 0;
  uint64_t thread_bytes = 0;
};
// Which values a group on GPUs takes from the table.
struct GpuPlace {
  std::string gpu;  // what the driver calls it
  int group_size = 0;
  bool shared = false;  // ranks have a GPU in common
};

// `cores`: how many the ranks of the group may use together.
Tuning builtin_tuning(int group_size, int cores);
GpuTuning builtin_gpu_tuning(int group_size);
// The table's row for this host and a group of this size; zero for what it does not say. Never fails: a table that
// cannot be read is no table.
Tuning load_tuning(int group_size);
GpuTuning load_gpu_tuning(const GpuPlace &place);
// `tuning` with `base` for its zeros.
Tuning merge_tuning(const Tuning &tuning, const Tuning &base);
GpuTuning merge_tuning(const GpuTuning &tuning, const GpuTuning &base);
// Puts the row into the table; `path` empty means the usual place.
phx_status save_tuning(const std::string &path, int group_size, const Tuning &tuning);
phx_status save_gpu_tuning(const std::string &path, const GpuPlace &place, const GpuTuning &tuning);
// Raises what is wrong with values that a caller or a peer gave.
phx_status check_tuning(const char *operation, const Tuning &tuning);
phx_status check_tuning(const char *operation, const GpuTuning &tuning);

// $PHALANX_TUNING, else phalanx/tuning in the user's cache directory. Empty when there is none.
std::string tuning_path();

}  // namespace phx
