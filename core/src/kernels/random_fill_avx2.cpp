// The kernels for x86-64 with AVX2.
#include <immintrin.h>

#include "kernels/random_fill_kernel.h"

namespace phx::random {
namespace {

// Computes four blocks at once, a word of each in the lower half of 64 bits. The upper halves hold remains of products,
// which the multiplication ignores.
struct Avx2 {
  static constexpr size_t kWidth = 4;
  static void blocks(uint32_t *words, uint64_t key, uint64_t number, size_t count) {
    const __m256i multiplier0 = _mm256_set1_epi64x(kMultiplier0), multiplier1 = _mm256_set1_epi64x(kMultiplier1);
    const __m256i lower = _mm256_set1_epi64x(0xffffffff);
    for (size_t i = 0; i < count; i += kWidth) {
      const __m256i numbers =
          _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(number + i)), _mm256_setr_epi64x(0, 1, 2, 3));
      __m256i a = numbers, b = _mm256_srli_epi64(numbers, 32), c = _mm256_setzero_si256(), d = c;
      uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
      for (int round = 0; round < kRounds; ++round) {
        const __m256i product0 = _mm256_mul_epu32(a, multiplier0), product1 = _mm256_mul_epu32(c, multiplier1);
        a = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product1, 32), b), _mm256_set1_epi64x(key0));
        c = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product0, 32), d), _mm256_set1_epi64x(key1));
        b = product1;
        d = product0;
        key0 += kWeyl0;
        key1 += kWeyl1;
      }
      const __m256i ab = _mm256_or_si256(_mm256_and_si256(a, lower), _mm256_slli_epi64(b, 32));
      const __m256i cd = _mm256_or_si256(_mm256_and_si256(c, lower), _mm256_slli_epi64(d, 32));
      const __m256i even = _mm256_unpacklo_epi64(ab, cd), odd = _mm256_unpackhi_epi64(ab, cd);  // blocks 0, 2 and 1, 3
      __m256i *out = reinterpret_cast<__m256i *>(words + 4 * i);
      _mm256_store_si256(out, _mm256_permute2x128_si256(even, odd, 0x20));
      _mm256_store_si256(out + 1, _mm256_permute2x128_si256(even, odd, 0x31));
    }
  }
};

}  // namespace

FillFn find_avx2(int32_t kind, int32_t dtype) { return select<Fill<Avx2>>(kind, dtype); }

}  // namespace phx::random
