// The candidates for large copies.
//
// No processor's name decides. On some, one string instruction is faster than any loop: its stores need not fetch the
// lines that they fill, nor wait for another core to give them up one after the other. On others loops are faster, and
// stores that bypass the cache fill lines that lie in the caches of others. See docs/explanation/algorithms.
#include <cstring>

#include "base/sanitizers.h"
#include "kernels/copies.h"
#include "kernels/kernels.h"
#include "kernels/pages.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace phx::kernels {
namespace {

#if defined(__x86_64__)

template <bool kStreaming>
inline void copy_line(char *to, const char *from) {
  const __m128i *line = reinterpret_cast<const __m128i *>(from);
  const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
  const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
  __m128i *target = reinterpret_cast<__m128i *>(to);
  if (kStreaming) {
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  } else {
    _mm_store_si128(target, a);
    _mm_store_si128(target + 1, b);
    _mm_store_si128(target + 2, c);
    _mm_store_si128(target + 3, d);
  }
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
  for (; at + kLine <= size; at += kLine)
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
template <class Lines>
void copy_aligned(void *to, const void *from, size_t size, const Lines &lines) {
  char *target = static_cast<char *>(to);
  const char *source = static_cast<const char *>(from);
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  if (size < head + kLine) {
    if (size != 0) std::memcpy(target, source, size);
    return;
  }
  std::memcpy(target, source, head);
  target += head, source += head, size -= head;
  const size_t done = lines(target, source, size);
  std::memcpy(target + done, source + done, size - done);
}

template <size_t (*lines)(char *, const char *, size_t)>
void aligned(void *to, const void *from, size_t size) {
  copy_aligned(to, from, size, lines);
}

#endif

void copy_plain(void *to, const void *from, size_t size) {
  if (size != 0) std::memcpy(to, from, size);
}

bool any_processor() { return true; }

constexpr uint32_t bit(CopyUse use) { return uint32_t{1} << static_cast<uint32_t>(use); }

struct Candidate {
  Copy copy;
  void (*function)(void *to, const void *from, size_t size);
  bool (*available)();
  uint32_t uses;
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
    {Copy::kMemcpy, &copy_plain, &any_processor, kInCache},
    {Copy::kPages, &aligned<copy_lines<false>>, &any_processor, kInCache | kExchanges},
    {Copy::kLines, &aligned<copy_lines_avx512>, &has_avx512f, kInCache},
    {Copy::kString, &aligned<copy_string>, &has_strings,
     bit(CopyUse::kAny) | bit(CopyUse::kPut) | bit(CopyUse::kPutOneWay) | bit(CopyUse::kAroundCache) | kExchanges},
    {Copy::kStream, &aligned<copy_lines<true>>, &any_processor, kAround},
    {Copy::kStreamLines, &aligned<stream_lines_avx512>, &has_avx512f, kAround},
};

#else

constexpr uint32_t kAllUses = (uint32_t{1} << kCopyUses) - 1;
bool never() { return false; }

constexpr Candidate kCandidates[kCopyCount] = {
    {Copy::kMemcpy, &copy_plain, &any_processor, kAllUses},
    {Copy::kPages, &copy_plain, &never, 0},
    {Copy::kLines, &copy_plain, &never, 0},
    {Copy::kString, &copy_plain, &never, 0},
    {Copy::kStream, &copy_plain, &never, 0},
    {Copy::kStreamLines, &copy_plain, &never, 0},
};

#endif

const Candidate &candidate(Copy copy) { return kCandidates[static_cast<size_t>(copy)]; }

// The candidates that take part in a contest: into slots only the widest stores that bypass the cache, and memcpy only
// for few bytes, because for more it is one of the others.
uint32_t candidates_for(CopyUse use, size_t of_class) {
  uint32_t found = 0;
  for (const Candidate &row : kCandidates) {
    const bool is_other_again =
        (row.copy == Copy::kMemcpy && of_class != 0 && copy_is_for(Copy::kPages, use)) ||
        (row.copy == Copy::kStream && use == CopyUse::kPutOneWay && copy_is_for(Copy::kStreamLines, use));
    if (copy_is_for(row.copy, use) && !is_other_again) found |= uint32_t{1} << static_cast<uint32_t>(row.copy);
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

[[maybe_unused]] const bool has_begun = [] {
  for (size_t use = 0; use < kCopyUses; ++use)
    for (size_t i = 0; i < kCopyClasses; ++i) {
      CopyContest &of = copy_contests[use][i];
      of.first = first_for(static_cast<CopyUse>(use), i);
      of.candidates = candidates_for(static_cast<CopyUse>(use), i);
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

void copy_for(CopyUse use, void *to, const void *from, size_t size) {
  if (size == 0) return;
  copied_bytes += size;
  by_fastest(use, size, [&](Copy copy) { copy_with(copy, to, from, size); });
}

}  // namespace

void copy_wide(void *to, const void *from, size_t size) { copy_for(CopyUse::kAny, to, from, size); }
void put(void *to, const void *from, size_t size) { copy_for(CopyUse::kPut, to, from, size); }
void put_one_way(void *to, const void *from, size_t size) { copy_for(CopyUse::kPutOneWay, to, from, size); }
void copy_one_way(void *to, const void *from, size_t size) { copy_for(CopyUse::kReadOneWay, to, from, size); }
void copy_streaming(void *to, const void *from, size_t size) { copy_for(CopyUse::kAroundCache, to, from, size); }
void copy_around(Copy copy, void *to, const void *from, size_t size) {
  copied_bytes += size;
  const Copy widest = candidate(Copy::kStreamLines).available() ? Copy::kStreamLines : Copy::kStream;
  copy_with(copy == Copy::kPages ? widest : copy, to, from, size);
}

}  // namespace phx::kernels
