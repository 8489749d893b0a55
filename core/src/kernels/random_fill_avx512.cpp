// The kernels for x86-64 with AVX-512 (F, BW, DQ, VL).
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of the undefined value with which its own intrinsics start (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "kernels/random_fill_kernel.h"

namespace phx::random {
namespace {

// Computes eight blocks at once; see random_fill_avx2.cpp.
struct Avx512 {
  static constexpr size_t kWidth = 8;
  static void blocks(uint32_t *words, uint64_t key, uint64_t number, size_t count) {
    const __m512i multiplier0 = _mm512_set1_epi64(kMultiplier0), multiplier1 = _mm512_set1_epi64(kMultiplier1);
    const __m512i lower = _mm512_set1_epi64(0xffffffff);
    const __m512i first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11),
                  last = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    for (size_t i = 0; i < count; i += kWidth) {
      const __m512i numbers = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(number + i)),
                                               _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
      __m512i a = numbers, b = _mm512_srli_epi64(numbers, 32), c = _mm512_setzero_si512(), d = c;
      uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
      for (int round = 0; round < kRounds; ++round) {
        const __m512i product0 = _mm512_mul_epu32(a, multiplier0), product1 = _mm512_mul_epu32(c, multiplier1);
        // 0x96: the exclusive or of three
        a = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product1, 32), b, _mm512_set1_epi64(key0), 0x96);
        c = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product0, 32), d, _mm512_set1_epi64(key1), 0x96);
        b = product1;
        d = product0;
        key0 += kWeyl0;
        key1 += kWeyl1;
      }
      const __m512i ab = _mm512_or_si512(_mm512_and_si512(a, lower), _mm512_slli_epi64(b, 32));
      const __m512i cd = _mm512_or_si512(_mm512_and_si512(c, lower), _mm512_slli_epi64(d, 32));
      _mm512_store_si512(words + 4 * i, _mm512_permutex2var_epi64(ab, first, cd));
      _mm512_store_si512(words + 4 * i + 16, _mm512_permutex2var_epi64(ab, last, cd));
    }
  }
};

}  // namespace

FillFn find_avx512(int32_t kind, int32_t dtype) { return select<Fill<Avx512>>(kind, dtype); }

}  // namespace phx::random
