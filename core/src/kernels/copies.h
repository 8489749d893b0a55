// The candidates for large copies, and who makes which: a contest for each use and class of size. It decides about
// speed alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/ticks.h"
#include "kernels/contest.h"

namespace phx::kernels {

// The rows of the table in copy.cpp.
enum class Copy : uint8_t {
  kMemcpy,
  kPages,        // four pages side by side (pages.h)
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
// An exchange (kernels.h) with that candidate for CopyUse::kExchange, or kExchangeAround if it is `streaming`.
void exchange_with(Copy copy, void *out, void *slot, const void *next, size_t size, bool streaming);

struct CopyContest {
  Contest contest;
  uint32_t candidates = 0;  // those that take part, by the number of their row; 0 before this library is initialized
  Copy first = Copy::kMemcpy;
};
extern CopyContest copy_contests[kCopyUses][kCopyClasses];

// Calls `make` with the candidate that is to make a copy of `size` bytes, of which few say nothing about the others.
template <class Make>
void by_fastest(CopyUse use, size_t size, const Make &make) {
  CopyContest &of = copy_contests[static_cast<size_t>(use)][copy_class(size)];
  if (size < kSmallCopyBytes || (of.candidates & (of.candidates - 1)) == 0) return make(of.first);
  const Contest::Turn turn = of.contest.next(of.candidates, static_cast<uint8_t>(of.first));
  const Copy copy = static_cast<Copy>(turn.candidate);
  if (!turn.is_timed) return make(copy);
  const uint64_t begin = ticks();
  make(copy);
  of.contest.took(turn, ((ticks() - begin) << 10) / size, of.candidates);
}

}  // namespace phx::kernels
