// The copies of collectives and messages: memcpy for few bytes, else whichever candidate is fastest for the use. A
// contest for each use and class of size decides that, about speed alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/contest.h"

namespace phx::kernels {

// The rows of the table in copy.cpp.
enum class Copy : uint8_t {
  kMemcpy,
  kPages,        // four pages side by side
  kLines,        // in the order of the lines, with one AVX-512 store for each
  kString,       // rep movsb
  kStream,       // stores that bypass the cache, four pages side by side
  kStreamLines,  // the same with one AVX-512 store for each line
};
inline constexpr size_t kCopyCount = 6;

enum class CopyUse : uint8_t {
  kAny,             // out of slots, within a rank
  kPut,             // into slots
  kPutOneWay,       // into a slot that this rank fills again and again, and others only read
  kReadOneWay,      // out of such a slot
  kAroundCache,     // results that would not stay in the cache until they are read
  kExchange,        // both copies of an exchange; kPages: in one pass over the slot
  kExchangeAround,  // the same where the result would not stay in the cache; kPages: with stores that bypass it
};                  // between the candidates for the last one, ops/bypass.h decides, with contests of calls
inline constexpr size_t kCopyUses = 7;

// Below kSmallCopyBytes every copy is memcpy, inlined by the caller.
inline constexpr size_t kSmallCopyBytes = size_t{16} << 10;
inline constexpr size_t kCopyClasses = 3;
inline size_t copy_class(size_t size) { return size_t{size >= size_t{96} << 10} + size_t{size > size_t{256} << 10}; }

// Whether this processor and build have the candidate, and it may serve that use.
bool copy_is_for(Copy copy, CopyUse use);

// Copies with that candidate, which copy_is_for allows for some use. Later stores are not reordered before it.
void copy_with(Copy copy, void *to, const void *from, size_t size);
// An exchange (see `exchange`) with that candidate for CopyUse::kExchange, or kExchangeAround if it is `streaming`.
void exchange_with(Copy copy, void *out, void *slot, const void *next, size_t size, bool streaming);

struct CopyContest {
  Contest contest;
  uint32_t candidates = 0;  // those that take part, by the number of their row; 0 before this library is initialized
  Copy first = Copy::kMemcpy;
};
extern CopyContest copy_contests[kCopyUses][kCopyClasses];

// Asks this core to move lines that it has just written to the cache that all cores share. Does nothing on processors
// without the instruction: x86 processors treat it as a no-operation.
inline void demote([[maybe_unused]] const void *at, [[maybe_unused]] size_t size) {
#if defined(__x86_64__)
  const char *line = static_cast<const char *>(at);
  for (const char *const end = line + size; line < end; line += 64) asm volatile("cldemote %0" : : "m"(*line));
#endif
}

// Asks for lines that this core is about to write, all at once. Its stores would ask for one after the other.
inline void ask_for([[maybe_unused]] const void *at, [[maybe_unused]] size_t size) {
#if defined(__x86_64__)
  const char *line = static_cast<const char *>(at);
  for (const char *const end = line + size; line < end; line += 64) asm volatile("prefetchw %0" : : "m"(*line));
#endif
}

// Copies with whichever candidate is fastest for the use at the moment.
void copy_for(CopyUse use, void *to, const void *from, size_t size);
// Copies by this candidate; kPages, which serves exchanges: by the widest stores that bypass the cache.
void copy_around(Copy copy, void *to, const void *from, size_t size);
// Copies `slot` to `out` and `next` to `slot`, whose lines this core owns from then on. next NULL: the slot keeps its
// data. `around`: the candidate that stores to `out` around the caches; kMemcpy: none. The three must not overlap.
void exchange(void *out, void *slot, const void *next, size_t size, Copy around);
// The same in one pass over the slot, whatever is usual.
void exchange_lines(void *out, void *slot, const void *next, size_t size);
// For tests: the bytes that this thread has copied with the functions above.
extern thread_local size_t copied_bytes;

}  // namespace phx::kernels

namespace phx {

inline void copy_bytes(void *to, const void *from, size_t size) {
  if (size == 0 || to == from) return;  // memcpy with NULL is undefined even for nothing
  if (size >= kernels::kSmallCopyBytes)
    kernels::copy_for(kernels::CopyUse::kAny, to, from, size);
  else
    std::memcpy(to, from, size);
}

// Copies into a slot that others are going to read. Few bytes are moved on to the cache that all cores share: the
// others read them sooner from there, and this core need not ask for the lines back when it fills the slot again. For
// more bytes, below `asked`, it asks for all lines before it writes to the first.
inline void put_bytes(void *slot, const void *from, size_t size, size_t asked = kernels::kSmallCopyBytes) {
  if (size >= kernels::kSmallCopyBytes) return kernels::copy_for(kernels::CopyUse::kPut, slot, from, size);
  const bool few = size <= size_t{1} << 10;
  if (!few && size < asked) kernels::ask_for(slot, size);
  if (size != 0) std::memcpy(slot, from, size);
  if (few) kernels::demote(slot, size);
}

// The same where others leave something in the same lines, so that this core has most of them when it comes back.
inline void put_to_swap(void *slot, const void *from, size_t size) {
  if (size >= kernels::kSmallCopyBytes) return kernels::copy_for(kernels::CopyUse::kPut, slot, from, size);
  if (size != 0) std::memcpy(slot, from, size);
  if (size <= size_t{2} << 10) kernels::demote(slot, size);
}

// The same for a slot that this rank fills again and again, and others only read. The caches of the others hold its
// lines then, and some stores wait until each is taken away from there.
inline void put_one_way(void *slot, const void *from, size_t size) {
  if (size >= kernels::kSmallCopyBytes)
    kernels::copy_for(kernels::CopyUse::kPutOneWay, slot, from, size);
  else
    put_bytes(slot, from, size, size_t{4} << 10);  // a gather of 4 KiB from each of three is 1 % slower if it asks
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
    kernels::copy_for(kernels::CopyUse::kAroundCache, to, from, size);
  else
    copy_bytes(to, from, size);
}

// Whether ranks that only read what put_one_way wrote, `bytes` in one call, read it as kernels::CopyUse::kReadOneWay.
// From 512 KiB on, string instructions that read lines while others write them fall, now and then, into a state in
// which both take twice as long. Where ranks share cores, the writer gets lines back sooner that were not read by
// strings.
inline bool reads_one_way(size_t bytes, bool streaming, bool ranks_share_cores) {
  return bytes >= (ranks_share_cores ? size_t{128} << 10 : size_t{512} << 10) && !streaming;
}

}  // namespace phx
