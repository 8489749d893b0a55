// The candidates for large copies, and exchanges, which copy data out of a slot and new data into it in one pass.
//
// No processor's name decides. On some, one string instruction is faster than any loop: its stores need not fetch the
// lines that they fill, nor wait for another core to give them up one after the other. On others loops are faster, and
// stores that bypass the cache fill lines that lie in the caches of others. See docs/explanation/algorithms.
#include "base/sanitizers.h"
#include "base/ticks.h"
#include "kernels/copies.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace phx::kernels {
namespace {

constexpr size_t kLineBytes = 64;

#if defined(__x86_64__)

// Calls `line` with the offset of each whole line of `size` bytes. Returns how many bytes these lines have. The
// hardware prefetcher follows one stream in each 4 KiB page, so a copy that walks through one page at a time waits for
// memory, or for another core's cache, most of the time. Four pages side by side nearly double the rate. Always
// inlined, so that `line` may use the instruction set for which the caller is compiled.
template <class Line>
[[gnu::always_inline]] inline size_t for_lines_by_pages(size_t size, const Line &line) {
  constexpr size_t kPage = 4096, kPages = 4;
  size_t at = 0;
  for (; at + kPages * kPage <= size; at += kPages * kPage)
    for (size_t i = 0; i < kPage; i += kLineBytes)
      for (size_t page = 0; page < kPages; ++page) line(at + page * kPage + i);
  for (; at + kLineBytes <= size; at += kLineBytes) line(at);
  return at;
}

template <bool kStreaming>
inline void put(char *to, __m128i value) {
  if (kStreaming)
    _mm_stream_si128(reinterpret_cast<__m128i *>(to), value);
  else
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), value);
}

template <bool kStreaming>
inline void copy_line(char *to, const char *from) {
  __m128i part[kLineBytes / sizeof(__m128i)];
  for (size_t i = 0; i < kLineBytes / sizeof part[0]; ++i)
    part[i] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from) + i);
  for (size_t i = 0; i < kLineBytes / sizeof part[0]; ++i) put<kStreaming>(to + i * sizeof part[0], part[i]);
}

// Copies any number of bytes. Later stores are not reordered before it.
inline size_t copy_string(char *to, const char *from, size_t size) {
  size_t left = size;
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(left) : : "memory");
  return size;
}

// Copies whole lines to an aligned target. Returns how many bytes are done.
template <bool kStreaming>
size_t copy_lines(char *to, const char *from, size_t size) {
  const size_t done = for_lines_by_pages(size, [&](size_t at) { copy_line<kStreaming>(to + at, from + at); });
  if (kStreaming) _mm_sfence();  // streaming stores are not ordered before later stores without it
  return done;
}

// The same in the order of the lines, with one store for each line.
__attribute__((target("avx512f"))) size_t copy_lines_avx512(char *to, const char *from, size_t size) {
  size_t at = 0;
  for (; at + kLineBytes <= size; at += kLineBytes)
    _mm512_store_si512(reinterpret_cast<__m512i *>(to + at), _mm512_loadu_si512(from + at));
  return at;
}

// The same with stores that bypass the cache, one for each line.
__attribute__((target("avx512f"))) size_t stream_lines_avx512(char *to, const char *from, size_t size) {
  const size_t done = for_lines_by_pages(
      size, [&](size_t at) __attribute__((target("avx512f"))) {
        _mm512_stream_si512(reinterpret_cast<__m512i *>(to + at), _mm512_loadu_si512(from + at));
      });
  _mm_sfence();
  return done;
}

// Copies with `lines`, which copies whole lines to an aligned target and returns how many bytes are done.
template <size_t (*lines)(char *, const char *, size_t)>
void aligned(void *to, const void *from, size_t size) {
  char *target = static_cast<char *>(to);
  const char *source = static_cast<const char *>(from);
  const size_t head = (kLineBytes - reinterpret_cast<uintptr_t>(to) % kLineBytes) % kLineBytes;
  if (size < head + kLineBytes) {
    if (size != 0) std::memcpy(target, source, size);
    return;
  }
  std::memcpy(target, source, head);
  target += head, source += head, size -= head;
  const size_t done = lines(target, source, size);
  std::memcpy(target + done, source + done, size - done);
}

#endif

void copy_plain(void *to, const void *from, size_t size) {
  if (size != 0) std::memcpy(to, from, size);
}

bool any_processor() { return true; }

constexpr uint32_t bit(CopyUse use) { return uint32_t{1} << static_cast<uint32_t>(use); }

struct Candidate {
  void (*function)(void *to, const void *from, size_t size) = &copy_plain;
  bool (*available)() = &any_processor;
  uint32_t uses = 0;
};

#if defined(__x86_64__)

bool has_avx512f() {
  static const bool has = __builtin_cpu_supports("avx512f") != 0;
  return has;
}

// FSRM: string instructions that are not slow to start. The processor says so whether or not they beat loops.
bool has_short_strings() {
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & 1u << 4) != 0;
  }();
  return has;
}

#if defined(PHX_SANITIZED)  // sanitizers do not see the accesses of inline assembly
bool has_strings() { return false; }
#else
bool has_strings() { return true; }
#endif

constexpr uint32_t kInCache =
    bit(CopyUse::kAny) | bit(CopyUse::kPut) | bit(CopyUse::kPutOneWay) | bit(CopyUse::kReadOneWay);
constexpr uint32_t kExchanges = bit(CopyUse::kExchange) | bit(CopyUse::kExchangeAround);
constexpr uint32_t kAround = bit(CopyUse::kPutOneWay) | bit(CopyUse::kAroundCache);

// Strings may not read what one rank writes again and again and others only read. Now and then, for seconds, some
// processors fall into a state in which such a reader takes twice as long, which no measurement of milliseconds shows.
constexpr Candidate kCandidates[kCopyCount] = {
    /* kMemcpy */ {&copy_plain, &any_processor, kInCache},
    /* kPages */ {&aligned<copy_lines<false>>, &any_processor, kInCache | kExchanges},
    /* kLines */ {&aligned<copy_lines_avx512>, &has_avx512f, kInCache},
    /* kString */
    {&aligned<copy_string>, &has_strings,
     bit(CopyUse::kAny) | bit(CopyUse::kPut) | bit(CopyUse::kPutOneWay) | bit(CopyUse::kAroundCache) | kExchanges},
    /* kStream */ {&aligned<copy_lines<true>>, &any_processor, kAround},
    /* kStreamLines */ {&aligned<stream_lines_avx512>, &has_avx512f, kAround},
};

#else

constexpr uint32_t kAllUses = (uint32_t{1} << kCopyUses) - 1;
constexpr Candidate kCandidates[kCopyCount] = {{&copy_plain, &any_processor, kAllUses}};  // kMemcpy

#endif

const Candidate &candidate(Copy copy) { return kCandidates[static_cast<size_t>(copy)]; }

// The candidates that take part in a contest: into slots only the widest stores that bypass the cache, and memcpy only
// for few bytes, because for more it is one of the others.
uint32_t candidates_for(CopyUse use, size_t of_class) {
  uint32_t found = 0;
  for (size_t i = 0; i < kCopyCount; ++i) {
    const Copy copy = static_cast<Copy>(i);
    const bool is_other_again =
        (copy == Copy::kMemcpy && of_class != 0 && copy_is_for(Copy::kPages, use)) ||
        (copy == Copy::kStream && use == CopyUse::kPutOneWay && copy_is_for(Copy::kStreamLines, use));
    if (copy_is_for(copy, use) && !is_other_again) found |= uint32_t{1} << i;
  }
  return found;
}

// The candidate that makes the copies until another one has proved to be faster.
Copy first_for(CopyUse use, size_t of_class) {
#if defined(__x86_64__)
  const bool strings = has_strings() && has_short_strings(), last = of_class == kCopyClasses - 1;
  const Copy loop = of_class == 0 ? Copy::kMemcpy : Copy::kPages;
  const Copy around = has_avx512f() ? Copy::kStreamLines : Copy::kStream;
  switch (use) {
    case CopyUse::kAny:
    case CopyUse::kPut: return strings ? Copy::kString : loop;
    case CopyUse::kPutOneWay: return strings ? Copy::kString : has_avx512f() ? loop : around;
    case CopyUse::kReadOneWay: return loop;
    case CopyUse::kAroundCache: return strings && last ? Copy::kString : around;
    case CopyUse::kExchange:
    case CopyUse::kExchangeAround: return strings ? Copy::kString : Copy::kPages;
  }
#endif
  (void)use, (void)of_class;
  return Copy::kMemcpy;
}

// By which part of the time a candidate must be faster, as 1 / 2^n. Where one rank writes what others only read, the
// choice of one side also changes the time of the other, which it does not see: on a Xeon a broadcast of 1 MiB takes a
// tenth longer if its readers store line by line, though they take no longer themselves.
uint32_t margin_for(CopyUse use) {
  return use == CopyUse::kReadOneWay ? 3 : use == CopyUse::kPutOneWay ? 4 : ContestRules().margin;
}

[[maybe_unused]] const bool has_begun = [] {
  for (size_t use = 0; use < kCopyUses; ++use)
    for (size_t i = 0; i < kCopyClasses; ++i) {
      CopyContest &of = copy_contests[use][i];
      of.first = first_for(static_cast<CopyUse>(use), i);
      of.candidates = candidates_for(static_cast<CopyUse>(use), i);
      of.contest.set_margin(margin_for(static_cast<CopyUse>(use)));
    }
  return true;
}();

}  // namespace

CopyContest copy_contests[kCopyUses][kCopyClasses];

bool copy_is_for(Copy copy, CopyUse use) {
  return (candidate(copy).uses & bit(use)) != 0 && candidate(copy).available();
}

void copy_with(Copy copy, void *to, const void *from, size_t size) { candidate(copy).function(to, from, size); }

thread_local size_t copied_bytes = 0;

namespace {

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

// ---- exchanges

constexpr size_t kStringBytes = size_t{8} << 10;
constexpr size_t kPieceBytes = size_t{64} << 10;  // stays in the second-level cache between the two

// A line that the owner of a slot only reads stays shared with the peer that wrote it, and the owner's next write to it
// must first ask the peer to give it up, which is about as expensive as fetching it. Writing the line while it is being
// read fetches it once for both (measured on two cores that share a third-level cache: 27 GB/s to read and write,
// against 28 to read and then 22 to write). The pass walks through four pages side by side.
//
// A string instruction takes lines over without fetching them or waiting for each. On some processors two of them, one
// after the other, are faster than one pass of stores: a contest decides.

// Returns how many bytes it has done. The rest, less than kStringBytes, is faster with vectors.
size_t strings(char *out, char *slot, const char *next, size_t size) {
  size_t at = 0;
  while (size - at >= kStringBytes) {
    const size_t piece = size - at < kPieceBytes ? size - at : kPieceBytes;
    copy_with(Copy::kString, out + at, slot + at, piece);
    if (next != slot) copy_with(Copy::kString, slot + at, next + at, piece);
    at += piece;
  }
  return at;
}

#if defined(__x86_64__)

template <bool kStreaming>
size_t lines_sse2(char *out, char *slot, const char *next, size_t size) {
  return for_lines_by_pages(size, [&](size_t at) {
    for (size_t i = at; i < at + kLineBytes; i += sizeof(__m128i)) {
      const __m128i old = _mm_loadu_si128(reinterpret_cast<const __m128i *>(slot + i));
      const __m128i fresh = _mm_loadu_si128(reinterpret_cast<const __m128i *>(next + i));
      put<kStreaming>(out + i, old);
      put<false>(slot + i, fresh);
    }
  });
}

__attribute__((target("avx512f"))) size_t lines_avx512(char *out, char *slot, const char *next, size_t size) {
  return for_lines_by_pages(
      size, [&](size_t at) __attribute__((target("avx512f"))) {
        const __m512i old = _mm512_loadu_si512(slot + at), fresh = _mm512_loadu_si512(next + at);
        _mm512_storeu_si512(out + at, old);
        _mm512_storeu_si512(slot + at, fresh);
      });
}

size_t lines(char *out, char *slot, const char *next, size_t size, bool streaming) {
  if (streaming) return lines_sse2<true>(out, slot, next, size);
  return has_avx512f() ? lines_avx512(out, slot, next, size) : lines_sse2<false>(out, slot, next, size);
}

#else

size_t lines(char *, char *, const char *, size_t, bool) { return 0; }

#endif

}  // namespace

void copy_for(CopyUse use, void *to, const void *from, size_t size) {
  if (size == 0) return;
  copied_bytes += size;
  by_fastest(use, size, [&](Copy copy) { copy_with(copy, to, from, size); });
}

void copy_around(Copy copy, void *to, const void *from, size_t size) {
  copied_bytes += size;
  const Copy widest = candidate(Copy::kStreamLines).available() ? Copy::kStreamLines : Copy::kStream;
  copy_with(copy == Copy::kPages ? widest : copy, to, from, size);
}

void exchange(void *out, void *slot, const void *next, size_t size, Copy around) {
  if (size == 0) return;
  copied_bytes += next == nullptr ? size : 2 * size;
  if (around != Copy::kMemcpy) return exchange_with(around, out, slot, next, size, true);
  by_fastest(CopyUse::kExchange, size, [&](Copy copy) { exchange_with(copy, out, slot, next, size, false); });
}

void exchange_lines(void *out, void *slot, const void *next, size_t size) {
  copied_bytes += next == nullptr ? size : 2 * size;
  exchange_with(Copy::kPages, out, slot, next, size, false);
}

void exchange_with(Copy copy, void *out, void *slot, const void *next, size_t size, bool streaming) {
  if (size == 0) return;
  char *to = static_cast<char *>(out), *middle = static_cast<char *>(slot);
  const char *from = static_cast<const char *>(next == nullptr ? slot : next);
  size_t done = copy == Copy::kString ? strings(to, middle, from, size) : 0;
  streaming = streaming && done == 0;
  if (streaming) {
    done = (kLineBytes - reinterpret_cast<uintptr_t>(to) % kLineBytes) % kLineBytes;
    if (done > size) done = size;
    std::memcpy(to, middle, done);  // NOLINT(clang-analyzer-core.NonNullParamChecker): measurements have memory
    if (next != nullptr) std::memcpy(middle, from, done);
  }
  done += lines(to + done, middle + done, from + done, size - done, streaming);
#if defined(__x86_64__)
  if (streaming) _mm_sfence();
#endif
  std::memcpy(to + done, middle + done, size - done);
  if (next != nullptr) std::memcpy(middle + done, from + done, size - done);
}

}  // namespace phx::kernels
