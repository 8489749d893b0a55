// The copies of collectives and messages: memcpy for few bytes, else whatever is fastest for the use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/copies.h"
#include "kernels/kernels.h"

namespace phx {

inline constexpr size_t kDemotedBytes = size_t{2} << 10;

inline void copy_bytes(void *to, const void *from, size_t size) {
  if (size == 0 || to == from) return;  // memcpy with NULL is undefined even for nothing
  if (size >= kernels::kSmallCopyBytes)
    kernels::copy_wide(to, from, size);
  else
    std::memcpy(to, from, size);
}

// Copies into a slot that others are going to read. Few bytes are moved on to the cache that all cores share: the
// others read them sooner from there, and this core need not ask for the lines back when it fills the slot again.
inline void put_bytes(void *slot, const void *from, size_t size) {
  if (size >= kernels::kSmallCopyBytes) return kernels::put(slot, from, size);
  if (size != 0) std::memcpy(slot, from, size);
  if (size <= kDemotedBytes) kernels::demote(slot, size);
}

// The same for a slot that this rank fills again and again, and others only read. The caches of the others hold its
// lines then, and some stores wait until each is taken away from there.
inline void put_one_way(void *slot, const void *from, size_t size) {
  if (size >= kernels::kSmallCopyBytes)
    kernels::put_one_way(slot, from, size);
  else
    put_bytes(slot, from, size);
}

// Copies part of a result. `around`: the candidate that copies around the caches; kMemcpy: the result stays in them.
inline void deliver_bytes(void *to, const void *from, size_t size, kernels::Copy around) {
  if (around == kernels::Copy::kMemcpy)
    copy_bytes(to, from, size);
  else if (size != 0 && to != from)
    kernels::copy_around(around, to, from, size);
}
// The same where the size of the whole alone decides. `streaming`: it would not stay in the caches.
inline void deliver_bytes(void *to, const void *from, size_t size, bool streaming) {
  if (streaming && to != from)
    kernels::copy_streaming(to, from, size);
  else
    copy_bytes(to, from, size);
}

// From this size of a call on, string instructions that read lines while others write them fall, now and then, into a
// state in which both take twice as long.
inline constexpr size_t kOneWayBytes = size_t{512} << 10;

// Whether ranks that only read what put_one_way wrote, `bytes` in one call, read it with kernels::copy_one_way.
inline bool reads_one_way(size_t bytes, bool streaming) { return bytes >= kOneWayBytes && !streaming; }

}  // namespace phx
