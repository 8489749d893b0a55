// The streaming copy.
#include <cstring>

#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace phx::kernels {

#if defined(__x86_64__)

// Non-temporal stores spare the read of every line before it is written, and leave the cache to the data that is used
// again.
void copy_streaming(void *to, const void *from, size_t size) {
  constexpr size_t kLine = 64;
  char *out = static_cast<char *>(to);
  const char *in = static_cast<const char *>(from);
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(out) % kLine) % kLine;
  if (size < head + kLine) {
    if (size != 0) std::memcpy(out, in, size);
    return;
  }
  std::memcpy(out, in, head);
  size_t at = head;
  for (; at + kLine <= size; at += kLine) {
    const __m128i *line = reinterpret_cast<const __m128i *>(in + at);
    const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
    const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
    __m128i *target = reinterpret_cast<__m128i *>(out + at);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();  // such stores are not ordered with later ones by themselves
  std::memcpy(out + at, in + at, size - at);
}

#else

void copy_streaming(void *to, const void *from, size_t size) {
  if (size != 0) std::memcpy(to, from, size);
}

#endif

}  // namespace phx::kernels
