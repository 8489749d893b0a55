#include "tuning/tuning.h"

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

Tuning merge_tuning(const Tuning &tuning, const Tuning &base) {
  const auto pick = [](uint64_t value, uint64_t other) { return value != 0 ? value : other; };
  Tuning merged;
  merged.one_shot_bytes = pick(tuning.one_shot_bytes, base.one_shot_bytes);
  merged.chunk_bytes = pick(tuning.chunk_bytes, base.chunk_bytes);
  merged.streaming_bytes = pick(tuning.streaming_bytes, base.streaming_bytes);
  merged.push_bytes = pick(tuning.push_bytes, base.push_bytes);
  return merged;
}

phx_status check_tuning(const char *operation, const Tuning &tuning) {
  const uint64_t most = uint64_t{1} << 62;
  if (tuning.one_shot_bytes > most || tuning.streaming_bytes > most)
    return fail(PHX_ERR_INVALID, operation, "%s: a size of a tuning is beyond any memory", operation);
  if (tuning.chunk_bytes < 4 * kKiB || tuning.chunk_bytes > (uint64_t{1} << 30) || tuning.push_bytes < 64 ||
      tuning.push_bytes > (uint64_t{1} << 30))
    return fail(PHX_ERR_INVALID, operation,
                "%s: chunk_bytes is %llu and push_bytes %llu; they must be 4 KiB to 1 GiB, and 64 bytes to 1 GiB",
                operation, static_cast<unsigned long long>(tuning.chunk_bytes),
                static_cast<unsigned long long>(tuning.push_bytes));
  return PHX_OK;
}

}  // namespace phx
