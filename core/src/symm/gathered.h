// A part of every rank's block, mapped once more one after another: all blocks' parts as one contiguous range.
#pragma once

#include <cstddef>
#include <list>
#include <mutex>

#include "phalanx/phalanx.h"

namespace phx {

// The ranges of one Symm. To make one costs as much as to touch all of its pages, so the last few stay for the next
// use.
class GatheredRanges {
 public:
  GatheredRanges() = default;
  GatheredRanges(const GatheredRanges &) = delete;
  GatheredRanges &operator=(const GatheredRanges &) = delete;
  ~GatheredRanges();

  // `bytes` at `offset` of each of `blocks`; whole pages. Where there is one of that part, it is the same again.
  phx_status map(const char *operation, void *const *blocks, size_t count, size_t offset, size_t bytes, void **out);
  phx_status unmap(const char *operation, const void *pointer);  // as often as it was mapped
  // Whether the range of just this part begins there.
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
  std::list<Range> ranges_;  // the one used last comes first
};

}  // namespace phx
