// Pools, and the allocator that replaces torch's CPU allocator. Takes the GIL only to add or release a segment.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "heap.h"

namespace phalanx_pool {

// The source of a pool's segments. Called without any lock of this module.
struct Source {
  struct Segment {
    char *base = nullptr;  // NULL: there is not enough memory, and `failure` has the reason
    void *owner = nullptr;
    std::string failure;
  };
  // May throw; the exception is raised by the op that allocates.
  std::function<Segment(size_t size_bytes)> make;
  // Called on any thread, with any locks held. Must not wait.
  void (*release)(void *owner);
};

class Pool;
using PoolRef = std::shared_ptr<Pool>;

// (address, size, bytes in use) of each segment
using Segments = std::vector<std::tuple<uintptr_t, size_t, size_t>>;

PoolRef open_pool(Source source);
// Releases empty segments, now and when they become empty.
void close_pool(const PoolRef &pool);
// Gives back what is empty now.
void trim(const PoolRef &pool);
Segments segments(const PoolRef &pool);
uint64_t layout(const PoolRef &pool);

// From now on this thread allocates from the pool. Returns what `leave` wants.
void *enter(PoolRef pool);
// False, and nothing is done, unless `entered` is what this thread entered last.
bool leave(void *entered);

// Puts the allocator in front of torch's. False: something else was put in front of it since.
bool install();

}  // namespace phalanx_pool
