// Copies data out of a slot and new data into it, in one pass.
//
// A line that the owner of a slot only reads stays shared with the peer that wrote it, and the owner's next write to it
// must first ask the peer to give it up, which is about as expensive as fetching it. Writing the line while it is being
// read fetches it once for both (measured on two cores that share a third-level cache: 27 GB/s to read and write,
// against 28 to read and then 22 to write). The pass walks through four pages side by side (pages.h).
//
// A string instruction takes lines over without fetching them or waiting for each. On some processors two of them, one
// after the other, are faster than one pass of stores: a contest decides (copies.h).
#include <cstring>

#include "kernels/copies.h"
#include "kernels/kernels.h"
#include "kernels/pages.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace phx::kernels {
namespace {

constexpr size_t kStringBytes = size_t{8} << 10;
constexpr size_t kPieceBytes = size_t{64} << 10;  // stays in the second-level cache between the two

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
    for (size_t i = at; i < at + kLine; i += sizeof(__m128i)) {
      const __m128i old = _mm_loadu_si128(reinterpret_cast<const __m128i *>(slot + i));
      const __m128i fresh = _mm_loadu_si128(reinterpret_cast<const __m128i *>(next + i));
      if (kStreaming)
        _mm_stream_si128(reinterpret_cast<__m128i *>(out + i), old);
      else
        _mm_storeu_si128(reinterpret_cast<__m128i *>(out + i), old);
      _mm_storeu_si128(reinterpret_cast<__m128i *>(slot + i), fresh);
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
  static const bool avx512 = __builtin_cpu_supports("avx512f") != 0;
  if (streaming) return lines_sse2<true>(out, slot, next, size);
  return avx512 ? lines_avx512(out, slot, next, size) : lines_sse2<false>(out, slot, next, size);
}

#else

size_t lines(char *, char *, const char *, size_t, bool) { return 0; }

#endif

}  // namespace

void exchange(void *out, void *slot, const void *next, size_t size, Copy around) {
  if (size == 0) return;
  copied_bytes += next == nullptr ? size : 2 * size;
  if (around != Copy::kMemcpy) return exchange_with(around, out, slot, next, size, true);
  by_fastest(CopyUse::kExchange, size, [&](Copy copy) { exchange_with(copy, out, slot, next, size, false); });
}

void exchange_with(Copy copy, void *out, void *slot, const void *next, size_t size, bool streaming) {
  if (size == 0) return;
  char *to = static_cast<char *>(out), *middle = static_cast<char *>(slot);
  const char *from = static_cast<const char *>(next == nullptr ? slot : next);
  size_t done = copy == Copy::kString ? strings(to, middle, from, size) : 0;
  streaming = streaming && done == 0;
  if (streaming) {
    done = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
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
