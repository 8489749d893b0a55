// The copies of collectives and messages: chooses a kernel, or memcpy, by the size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/processor.h"
#include "kernels/kernels.h"

namespace phx {

inline constexpr size_t kWideBytes = size_t{96} << 10;
inline constexpr size_t kStringBytes = size_t{16} << 10;
inline constexpr size_t kDemotedBytes = size_t{2} << 10;

inline void copy_bytes(void *to, const void *from, size_t size) {
  if (size == 0 || to == from) return;  // memcpy with NULL is undefined even for nothing
  if (size >= kWideBytes || (size >= kStringBytes && has_fast_strings()))
    kernels::copy_wide(to, from, size);
  else
    std::memcpy(to, from, size);
}

// Copies into a slot that others are going to read. Few bytes are moved on to the cache that all cores share: the
// others read them sooner from there, and this core need not ask for the lines back when it fills the slot again.
inline void put_bytes(void *slot, const void *from, size_t size) {
  copy_bytes(slot, from, size);
  if (size <= kDemotedBytes) kernels::demote(slot, size);
}

inline constexpr size_t kAroundBytes = size_t{16} << 10;

// The same for a slot that this rank fills again and again, and others only read. The caches of the others hold its
// lines then, and between AMD cores that share no third-level cache each store waits until a line is taken away from
// there: 3.4 GB/s, against 6 to 9 with stores that bypass the cache (128 and 64 KiB at a time). Fast string
// instructions do not wait for the lines: 40 GB/s, against 10 with stores that bypass the cache.
inline void put_one_way(void *slot, const void *from, size_t size) {
  if (size >= kAroundBytes && is_amd() && !has_fast_strings())
    kernels::copy_streaming(slot, from, size);
  else
    put_bytes(slot, from, size);
}

// Copies part of a result. `streaming`: with stores that bypass the cache, because the whole would not stay in it.
inline void deliver_bytes(void *to, const void *from, size_t size, bool streaming) {
  if (streaming && to != from)
    kernels::copy_streaming(to, from, size);
  else
    copy_bytes(to, from, size);
}

inline constexpr size_t kOneWayBytes = size_t{512} << 10;

// Whether ranks that only read what put_one_way wrote, `bytes` in one call, read it with kernels::copy_one_way. Up to
// 256 KiB the string instructions were never slow.
inline bool reads_one_way(size_t bytes, bool streaming) {
  return bytes >= kOneWayBytes && !streaming && has_fast_strings();
}

}  // namespace phx
