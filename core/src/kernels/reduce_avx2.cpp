// The kernels for x86-64 with AVX2 and F16C.
#include <immintrin.h>

#include "kernels/vector_kernel.h"

namespace phx::kernels {
namespace {

struct Avx2 {
  static constexpr int kBytes = 32;
  static constexpr bool kStreams = true;
  using Halves = Vector<uint16_t, kBytes>::Type;

  // vminps returns its second operand if the two are equal or one is NaN. So the two orders of the operands agree,
  // except that they give both of -0 and +0, whose `or` is -0, and both of a NaN and a number, whose `or` is a NaN.
  static PHX_ALWAYS_INLINE __m256 minimum(__m256 a, __m256 b) {
    return _mm256_or_ps(_mm256_min_ps(a, b), _mm256_min_ps(b, a));
  }
  static PHX_ALWAYS_INLINE __m256d minimum(__m256d a, __m256d b) {
    return _mm256_or_pd(_mm256_min_pd(a, b), _mm256_min_pd(b, a));
  }

  // Which NaN an operation returns depends on the order of its operands, which the compiler chooses, so every NaN
  // becomes the same one.
  static PHX_ALWAYS_INLINE __m256 canonical(__m256 v) {
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(v, nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  }
  static PHX_ALWAYS_INLINE __m256d canonical(__m256d v) {
    const __m256d nan = _mm256_castsi256_pd(_mm256_set1_epi64x(0x7ff8000000000000));
    return _mm256_blendv_pd(v, nan, _mm256_cmp_pd(v, v, _CMP_UNORD_Q));
  }

  static PHX_ALWAYS_INLINE __m256 widen_f16(const char *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
  }
  static PHX_ALWAYS_INLINE void narrow_f16(char *to, __m256 v) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static PHX_ALWAYS_INLINE __m256 widen_lower(Halves v) { return _mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)v)); }
  static PHX_ALWAYS_INLINE __m256 widen_upper(Halves v) {
    return _mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)v, 1));
  }
  static PHX_ALWAYS_INLINE Halves narrow(__m256 lower, __m256 upper) {
    return (Halves)_mm256_set_m128i(_mm256_cvtps_ph(upper, _MM_FROUND_TO_NEAREST_INT),
                                    _mm256_cvtps_ph(lower, _MM_FROUND_TO_NEAREST_INT));
  }

  // For complex numbers: both parts become the real part, both become the imaginary part, or the two are swapped.
  static PHX_ALWAYS_INLINE __m256 real(__m256 v) { return _mm256_moveldup_ps(v); }
  static PHX_ALWAYS_INLINE __m256 imaginary(__m256 v) { return _mm256_movehdup_ps(v); }
  static PHX_ALWAYS_INLINE __m256 swapped(__m256 v) { return _mm256_permute_ps(v, 0xb1); }
  static PHX_ALWAYS_INLINE __m256d real(__m256d v) { return _mm256_movedup_pd(v); }
  static PHX_ALWAYS_INLINE __m256d imaginary(__m256d v) { return _mm256_permute_pd(v, 0xf); }
  static PHX_ALWAYS_INLINE __m256d swapped(__m256d v) { return _mm256_permute_pd(v, 0x5); }

  // Stores that bypass the caches; `to` is aligned to the vector.
  static PHX_ALWAYS_INLINE void stream(char *to, __m256i v) { _mm256_stream_si256(reinterpret_cast<__m256i *>(to), v); }
  static PHX_ALWAYS_INLINE void stream(char *to, __m128i v) { _mm_stream_si128(reinterpret_cast<__m128i *>(to), v); }
  static PHX_ALWAYS_INLINE void fence() { _mm_sfence(); }
};

}  // namespace

ReduceFn find_avx2(int32_t dtype, int32_t op, Results results) { return find<Avx2>(dtype, op, results); }

}  // namespace phx::kernels
