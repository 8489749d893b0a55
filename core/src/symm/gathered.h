// Maps the same part of every rank's block a second time, one after another, as one contiguous range.
#pragma once

#include <cstddef>
#include <list>
#include <mutex>

#include "phalanx/phalanx.h"

namespace phx {

// The ranges of one Symm. Mapping one costs as much as touching all its pages, so the last few stay mapped.
class GatheredRanges {
 public:
  GatheredRanges() = default;
  GatheredRanges(const GatheredRanges &) = delete;
  GatheredRanges &operator=(const GatheredRanges &) = delete;
  ~GatheredRanges();

  // Maps `bytes`, which are whole pages, at `offset` of each of `blocks`, or returns the existing range of that part.
  phx_status map(const char *operation, void *const *blocks, size_t count, size_t offset, size_t bytes, void **out);
  phx_status unmap(const char *operation, const void *pointer);  // to be called once for each `map`
  // Whether a range of exactly this part begins at `pointer`.
  bool begins(const void *pointer, size_t offset, size_t bytes);

 private:
  struct Range {
    char *base;
    size_t offset;
    size_t bytes;  // of one rank
    size_t all;    // of all ranks
    size_t users;
  };
  void leave_idle(size_t most);

  std::mutex mutex_;
  std::list<Range> ranges_;  // the most recently used one comes first
};

}  // namespace phx
