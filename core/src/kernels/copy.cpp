// Copies that keep several pages in flight (pages.h).
//
// Where string instructions are fast, one of them is faster than any of these loops: its stores need not fetch the
// lines that they fill, nor wait for another core to give them up one after the other. There, stores that bypass the
// cache are faster only if the source lies in a cache; and if one rank writes what others only read, the times of the
// readers vary less without string instructions. See docs/explanation/algorithms.
#include <cstring>

#include "base/processor.h"
#include "kernels/kernels.h"
#include "kernels/pages.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace phx::kernels {

#if defined(__x86_64__)

namespace {

constexpr size_t kSlotBytes = size_t{256} << 10;  // a copy of more than this reads from memory, and not from a slot

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

// Whether this processor has fast string instructions and AVX-512.
bool has_strings_and_avx512() {
  static const bool avx512 = has_fast_strings() && __builtin_cpu_supports("avx512f") != 0;
  return avx512;
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

}  // namespace

void copy_streaming(void *to, const void *from, size_t size) {
  copy_aligned(to, from, size, [](char *target, const char *source, size_t bytes) {
    if (has_fast_strings() && bytes > kSlotBytes) return copy_string(target, source, bytes);
    return has_strings_and_avx512() ? stream_lines_avx512(target, source, bytes)
                                    : copy_lines<true>(target, source, bytes);
  });
}

void copy_wide(void *to, const void *from, size_t size) {
  copy_aligned(to, from, size, [](char *target, const char *source, size_t bytes) {
    return has_fast_strings() ? copy_string(target, source, bytes) : copy_lines<false>(target, source, bytes);
  });
}

void copy_one_way(void *to, const void *from, size_t size) {
  if (!has_strings_and_avx512()) return copy_wide(to, from, size);
  copy_aligned(to, from, size, copy_lines_avx512);
}

#else

void copy_one_way(void *to, const void *from, size_t size) { copy_wide(to, from, size); }

void copy_streaming(void *to, const void *from, size_t size) { copy_wide(to, from, size); }

void copy_wide(void *to, const void *from, size_t size) {
  if (size != 0) std::memcpy(to, from, size);
}

#endif

}  // namespace phx::kernels
