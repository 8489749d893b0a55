// Takes what lies in a slot and leaves something else there, in one pass.
//
// A line that the owner of a slot only reads stays shared with the peer that wrote it, and the owner's next write to it
// must first ask the peer to give it up: about as expensive as fetching it. Writing while the line is being read
// fetches it once, for both (measured on two cores that share a third-level cache: 27 GB/s to read and write, against
// 28 to read and then 22 to write). Four pages side by side: see copy.cpp.
//
// A string instruction takes lines over without fetching or waiting for each. Two of them, one after the other, are
// faster than one pass of stores.
#include <cstring>

#include "base/processor.h"
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace phx::kernels {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;
constexpr size_t kPages = 4;
constexpr size_t kStringBytes = size_t{8} << 10;
constexpr size_t kPieceBytes = size_t{64} << 10;  // stays in the second-level cache between the two

// Returns how many bytes it has done: too few are better off with vectors.
size_t strings(char *out, char *slot, const char *next, size_t size) {
  size_t at = 0;
  while (size - at >= kStringBytes) {
    const size_t piece = size - at < kPieceBytes ? size - at : kPieceBytes;
    copy_wide(out + at, slot + at, piece);
    if (next != slot) copy_wide(slot + at, next + at, piece);
    at += piece;
  }
  return at;
}

#if defined(__x86_64__)

struct Sse2 {
  template <bool kStreaming>
  static inline void line(char *out, char *slot, const char *next) {
    const __m128i *have = reinterpret_cast<const __m128i *>(slot), *coming = reinterpret_cast<const __m128i *>(next);
    __m128i *target = reinterpret_cast<__m128i *>(out), *kept = reinterpret_cast<__m128i *>(slot);
    for (int i = 0; i < 4; ++i) {
      const __m128i old = _mm_loadu_si128(have + i), fresh = _mm_loadu_si128(coming + i);
      if (kStreaming)
        _mm_stream_si128(target + i, old);
      else
        _mm_storeu_si128(target + i, old);
      _mm_storeu_si128(kept + i, fresh);
    }
  }
};

#define PHX_AVX512 __attribute__((target("avx512f")))

struct Avx512 {
  template <bool kStreaming>
  PHX_AVX512 static inline void line(char *out, char *slot, const char *next) {
    const __m512i old = _mm512_loadu_si512(slot), fresh = _mm512_loadu_si512(next);
    if (kStreaming)
      _mm512_stream_si512(reinterpret_cast<__m512i *>(out), old);
    else
      _mm512_storeu_si512(out, old);
    _mm512_storeu_si512(slot, fresh);
  }
};

template <bool kStreaming>
PHX_AVX512 size_t lines_avx512(char *out, char *slot, const char *next, size_t size) {
  size_t at = 0;
  for (; at + kPages * kPage <= size; at += kPages * kPage)
    for (size_t line = 0; line < kPage; line += kLine)
      for (size_t page = 0; page < kPages; ++page) {
        const size_t i = at + page * kPage + line;
        Avx512::line<kStreaming>(out + i, slot + i, next + i);
      }
  for (; at + kLine <= size; at += kLine) Avx512::line<kStreaming>(out + at, slot + at, next + at);
  return at;
}

template <bool kStreaming>
size_t lines_sse2(char *out, char *slot, const char *next, size_t size) {
  size_t at = 0;
  for (; at + kPages * kPage <= size; at += kPages * kPage)
    for (size_t line = 0; line < kPage; line += kLine)
      for (size_t page = 0; page < kPages; ++page) {
        const size_t i = at + page * kPage + line;
        Sse2::line<kStreaming>(out + i, slot + i, next + i);
      }
  for (; at + kLine <= size; at += kLine) Sse2::line<kStreaming>(out + at, slot + at, next + at);
  return at;
}

size_t lines(char *out, char *slot, const char *next, size_t size, bool streaming) {
  static const bool avx512 = __builtin_cpu_supports("avx512f") != 0;
  if (streaming) return lines_sse2<true>(out, slot, next, size);
  return avx512 ? lines_avx512<false>(out, slot, next, size) : lines_sse2<false>(out, slot, next, size);
}

#else

size_t lines(char *, char *, const char *, size_t, bool) { return 0; }

#endif

}  // namespace

void exchange(void *out, void *slot, const void *next, size_t size, bool streaming) {
  if (size == 0) return;
  char *to = static_cast<char *>(out), *middle = static_cast<char *>(slot);
  const char *from = static_cast<const char *>(next == nullptr ? slot : next);
  size_t done = has_fast_strings() ? strings(to, middle, from, size) : 0;
  streaming = streaming && done == 0;
  if (streaming) {
    done = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
    if (done > size) done = size;
    std::memcpy(to, middle, done);
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
