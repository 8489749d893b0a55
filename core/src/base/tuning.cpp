#include "base/tuning.h"

#include "base/processor.h"

namespace phx {
namespace {

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = 1024 * kKiB;
constexpr uint64_t kMost = uint64_t{1} << 62;  // beyond any memory: as a size to begin at, never
constexpr uint64_t kPack = 16;                 // bytes that a thread of a GPU loads at once

uint64_t pick(uint64_t value, uint64_t other) { return value != 0 ? value : other; }

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
  tuning.two_shot_bytes = group_size > 2 ? 256 * kKiB : kMost;
  tuning.multicast_bytes = 64 * kKiB;  // before, ranks compare where results are: another look at the others' pads
  tuning.copy_bytes = kMost;
  tuning.thread_bytes = kPack;
  return tuning;
}

Tuning merge_tuning(const Tuning &tuning, const Tuning &base) {
  Tuning merged;
  merged.one_shot_bytes = pick(tuning.one_shot_bytes, base.one_shot_bytes);
  merged.chunk_bytes = pick(tuning.chunk_bytes, base.chunk_bytes);
  merged.streaming_bytes = pick(tuning.streaming_bytes, base.streaming_bytes);
  merged.push_bytes = pick(tuning.push_bytes, base.push_bytes);
  return merged;
}

GpuTuning merge_tuning(const GpuTuning &tuning, const GpuTuning &base) {
  GpuTuning merged;
  merged.line_bytes = pick(tuning.line_bytes, base.line_bytes);
  merged.two_shot_bytes = pick(tuning.two_shot_bytes, base.two_shot_bytes);
  merged.multicast_bytes = pick(tuning.multicast_bytes, base.multicast_bytes);
  merged.copy_bytes = pick(tuning.copy_bytes, base.copy_bytes);
  merged.thread_bytes = pick(tuning.thread_bytes, base.thread_bytes);
  return merged;
}

phx_status check_tuning(const char *operation, const Tuning &tuning) {
  if (tuning.one_shot_bytes > kMost || tuning.streaming_bytes > kMost)
    return fail(PHX_ERR_INVALID, operation, "%s: a size of a tuning is beyond any memory", operation);
  if (tuning.chunk_bytes < 4 * kKiB || tuning.chunk_bytes > (uint64_t{1} << 30) || tuning.push_bytes < 64 ||
      tuning.push_bytes > (uint64_t{1} << 30))
    return fail(PHX_ERR_INVALID, operation,
                "%s: chunk_bytes is %llu and push_bytes %llu; they must be 4 KiB to 1 GiB, and 64 bytes to 1 GiB",
                operation, static_cast<unsigned long long>(tuning.chunk_bytes),
                static_cast<unsigned long long>(tuning.push_bytes));
  return PHX_OK;
}

phx_status check_tuning(const char *operation, const GpuTuning &tuning) {
  for (const uint64_t size : {tuning.line_bytes, tuning.two_shot_bytes, tuning.multicast_bytes, tuning.copy_bytes})
    if (size > kMost)
      return fail(PHX_ERR_INVALID, operation,
                  "%s: a size of a GPU's tuning is %llu; for one that no input has, give %llu", operation,
                  static_cast<unsigned long long>(size), static_cast<unsigned long long>(kMost));
  if (tuning.thread_bytes < kPack || tuning.thread_bytes > 4 * kKiB || tuning.thread_bytes % kPack != 0)
    return fail(PHX_ERR_INVALID, operation, "%s: thread_bytes is %llu; it must be a multiple of 16, up to 4096",
                operation, static_cast<unsigned long long>(tuning.thread_bytes));
  return PHX_OK;
}

}  // namespace phx
