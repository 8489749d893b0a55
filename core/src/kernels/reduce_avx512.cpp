// The kernels for x86-64 with AVX-512 F, BW, DQ and VL.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of the undefined value with which its own intrinsics start (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "kernels/vector_kernel.h"

namespace phx::kernels {
namespace {

// See reduce_avx2.cpp for why each of these functions does what it does.
struct Avx512 {
  static constexpr int kBytes = 64;
  static constexpr bool kStreams = true;
  using Halves = Vector<uint16_t, kBytes>::Type;

  static PHX_ALWAYS_INLINE __m512 minimum(__m512 a, __m512 b) {
    return _mm512_or_ps(_mm512_min_ps(a, b), _mm512_min_ps(b, a));
  }
  static PHX_ALWAYS_INLINE __m512d minimum(__m512d a, __m512d b) {
    return _mm512_or_pd(_mm512_min_pd(a, b), _mm512_min_pd(b, a));
  }

  static PHX_ALWAYS_INLINE __m512 canonical(__m512 v) {
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
    return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), nan);
  }
  static PHX_ALWAYS_INLINE __m512d canonical(__m512d v) {
    const __m512d nan = _mm512_castsi512_pd(_mm512_set1_epi64(0x7ff8000000000000));
    return _mm512_mask_mov_pd(v, _mm512_cmp_pd_mask(v, v, _CMP_UNORD_Q), nan);
  }

  static PHX_ALWAYS_INLINE __m512 widen_f16(const char *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
  }
  static PHX_ALWAYS_INLINE void narrow_f16(char *to, __m512 v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static PHX_ALWAYS_INLINE __m512 widen_lower(Halves v) { return _mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)v)); }
  static PHX_ALWAYS_INLINE __m512 widen_upper(Halves v) {
    return _mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)v, 1));
  }
  static PHX_ALWAYS_INLINE Halves narrow(__m512 lower, __m512 upper) {
    const __m512i half = _mm512_castsi256_si512(_mm512_cvtps_ph(lower, _MM_FROUND_TO_NEAREST_INT));
    return (Halves)_mm512_inserti64x4(half, _mm512_cvtps_ph(upper, _MM_FROUND_TO_NEAREST_INT), 1);
  }

  static PHX_ALWAYS_INLINE __m512 real(__m512 v) { return _mm512_moveldup_ps(v); }
  static PHX_ALWAYS_INLINE __m512 imaginary(__m512 v) { return _mm512_movehdup_ps(v); }
  static PHX_ALWAYS_INLINE __m512 swapped(__m512 v) { return _mm512_permute_ps(v, 0xb1); }
  static PHX_ALWAYS_INLINE __m512d real(__m512d v) { return _mm512_movedup_pd(v); }
  static PHX_ALWAYS_INLINE __m512d imaginary(__m512d v) { return _mm512_permute_pd(v, 0xff); }
  static PHX_ALWAYS_INLINE __m512d swapped(__m512d v) { return _mm512_permute_pd(v, 0x55); }

  static PHX_ALWAYS_INLINE void stream(char *to, __m512i v) { _mm512_stream_si512(reinterpret_cast<__m512i *>(to), v); }
  static PHX_ALWAYS_INLINE void stream(char *to, __m256i v) { _mm256_stream_si256(reinterpret_cast<__m256i *>(to), v); }
  static PHX_ALWAYS_INLINE void fence() { _mm_sfence(); }
};

}  // namespace

ReduceFn find_avx512(int32_t dtype, int32_t op, Results results) { return find<Avx512>(dtype, op, results); }

}  // namespace phx::kernels
