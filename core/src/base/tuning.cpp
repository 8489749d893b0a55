#include "base/tuning.h"

#include "base/processor.h"

namespace phx {
namespace {

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = 1024 * kKiB;

}  // namespace

// Measured with `phalanx tune` on two cores of a Xeon with AVX-512 and 2 MiB of second-level cache each, and of an EPYC
// with AVX-512, 1 MiB each and 32 MiB in common: see docs/explanation/algorithms.
Tuning builtin_tuning(int group_size, int cores) {
  Tuning tuning;
  // A rank with a core of its own waits a quarter of a microsecond at a barrier, one that shares it a few: then fewer
  // barriers win for longer.
  const bool crowded = group_size > cores;
  tuning.one_shot_bytes = crowded ? 8 * kKiB : 512;
  tuning.chunk_bytes = crowded ? 256 * kKiB : 128 * kKiB;
  tuning.streaming_bytes = 4 * kMiB;
  tuning.push_bytes = 16 * kKiB;
  if (is_amd()) {
    // Stores around the cache cost more there: all_gather of 4 MiB takes 269 us instead of 451 without them.
    tuning.streaming_bytes = 8 * kMiB;
    tuning.push_bytes = 8 * kKiB;
    // all_reduce of 2 KiB in one shot takes 0.32 us, in two 0.40; where the cores share no cache 0.38 and 0.50.
    if (!crowded) tuning.one_shot_bytes = 2 * kKiB;
  }
  return tuning;
}

// Not measured on a GPU yet: what one of sm_90 should come near. Two ranks read as much in one shot as in two.
GpuTuning builtin_gpu_tuning(int group_size) {
  GpuTuning tuning;
  tuning.line_bytes = 32 * kKiB;  // all that the pads have room for
  tuning.two_shot_bytes = group_size > 2 ? 256 * kKiB : kNeverBytes;
  tuning.multicast_bytes = 64 * kKiB;  // before, ranks compare where results are: another look at the others' pads
  tuning.copy_bytes = kNeverBytes;
  tuning.thread_bytes = 16;  // what a thread of a GPU loads at once
  return tuning;
}

}  // namespace phx
