#include "base/tuning.h"

namespace phx {
namespace {

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = 1024 * kKiB;

}  // namespace

// Measured with `phalanx tune` on two cores of a Xeon with AVX-512 and 2 MiB of second-level cache per core, and of an
// EPYC with AVX-512, 1 MiB per core and 32 MiB that they share: see docs/explanation/algorithms. Where the two differ,
// the value with which the worse of them loses less: `phalanx tune` finds the rest.
Tuning builtin_tuning(int group_size, int cores) {
  Tuning tuning;
  // A barrier takes a rank with a core of its own a quarter of a microsecond, and one that shares its core several:
  // there the algorithms with fewer barriers win up to larger sizes. Without sharing, all_reduce of 2 KiB on the EPYC
  // takes 0.32 us with one-shot and 0.40 with two-shot.
  const bool crowded = group_size > cores;
  tuning.one_shot_bytes = crowded ? 8 * kKiB : 2 * kKiB;
  tuning.chunk_bytes = crowded ? 256 * kKiB : 128 * kKiB;
  // On the EPYC, with 4 MiB, all_gather of 4 MiB takes 451 us instead of 269.
  tuning.streaming_bytes = 8 * kMiB;
  tuning.push_bytes = 8 * kKiB;
  return tuning;
}

// Estimates for sm_90, not measured on a GPU yet. With two ranks, one-shot reads as much as two-shot.
GpuTuning builtin_gpu_tuning(int group_size) {
  GpuTuning tuning;
  tuning.line_bytes = 32 * kKiB;  // all that fits into the pads
  tuning.two_shot_bytes = group_size > 2 ? 256 * kKiB : kNeverBytes;
  tuning.multicast_bytes = 64 * kKiB;  // multicast costs one more round over the pads, in which ranks compare offsets
  tuning.copy_bytes = kNeverBytes;
  tuning.thread_bytes = 16;  // the widest load of a GPU thread
  return tuning;
}

}  // namespace phx
