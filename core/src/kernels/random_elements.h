// Turns 128 random bits into elements of a tensor, with arithmetic that gives the same bits on every processor.
//
// Philox4x32-10 is from Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): a
// function from a key and a counter to four words. Element i of a tensor owns words of block i / 4, or of block i / 2
// if an element takes 64 bits, so that its value does not depend on which rank computes it:
//
//   elements of 32 bits   word i % 4 of block i / 4
//   elements of 64 bits   words 2 * (i % 2) and the one after it, the low half first, of block i / 2
//   normal                the two elements of an even i are r * cos(t) and r * sin(t), r from the first one's word and
//                         t from the second one's
//
// Only +, -, *, / and sqrt are used, each rounded once (no fused multiply-add: -ffp-contract=off, nvcc --fmad=false),
// so that the results do not depend on the instruction set and the compiler. Everything is in an unnamed namespace,
// because each file that includes this is compiled for another instruction set (see kernels/select.h).
#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>

#include "kernels/portable.h"

#ifdef __CUDACC__
#define PHX_RANDOM_FN __host__ __device__ __forceinline__
#else
#define PHX_RANDOM_FN inline __attribute__((always_inline))
#endif

namespace phx::random {
namespace {

constexpr uint32_t kMultiplier0 = 0xd2511f53, kMultiplier1 = 0xcd9e8d57;  // from table 2 of the paper
constexpr uint32_t kWeyl0 = 0x9e3779b9, kWeyl1 = 0xbb67ae85;              // what each round adds to the key
constexpr int kRounds = 10;

struct Block {
  uint32_t word[4];
};

PHX_RANDOM_FN Block philox(Block counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kMultiplier0) * counter.word[0];
    const uint64_t product1 = static_cast<uint64_t>(kMultiplier1) * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

// Block `number`, which is the lower half of the counter; the upper half is 0.
PHX_RANDOM_FN Block block_of(uint64_t key, uint64_t number) {
  return philox({{static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), 0, 0}},
                static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
}

using kernels::bits_as;

// 16-bit floats as bits, rounded as the results of reductions are.
struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

PHX_RANDOM_FN uint16_t f16_of(float value) { return kernels::Element<kernels::F16>::narrow(value); }
PHX_RANDOM_FN uint16_t bf16_of(float value) { return kernels::Element<kernels::BF16>::narrow(value); }

// How an element is stored, the type in which it is computed, and how many random bits a uniform element has: as many
// as its significand.
template <class E>
struct Element;
template <>
struct Element<float> {
  using Real = float;
  static constexpr int kBits = 24;
  static PHX_RANDOM_FN float store(float value) { return value; }
};
template <>
struct Element<double> {
  using Real = double;
  static constexpr int kBits = 53;
  static PHX_RANDOM_FN double store(double value) { return value; }
};
template <>
struct Element<F16> {
  using Real = float;
  static constexpr int kBits = 11;
  static PHX_RANDOM_FN F16 store(float value) { return {f16_of(value)}; }
};
template <>
struct Element<BF16> {
  using Real = float;
  static constexpr int kBits = 8;
  static PHX_RANDOM_FN BF16 store(float value) { return {bf16_of(value)}; }
};

// ---- functions of the unit interval ---------------------------------------------------------------------------------

// first + x * (second + x * (third + ...))
template <class Real>
PHX_RANDOM_FN Real polynomial(Real, Real last) {
  return last;
}
template <class Real, class... Rest>
PHX_RANDOM_FN Real polynomial(Real x, Real first, Rest... rest) {
  return first + x * polynomial(x, rest...);
}

// k * 2^-bits for k in [0, 2^bits): never 1.
template <int kBits>
PHX_RANDOM_FN float unit(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> (32 - kBits))) * (1.0f / (1 << kBits));
}
// Converts an integer below 2^52 to double; written so because few processors convert vectors of 64-bit integers.
PHX_RANDOM_FN double whole(uint64_t below_2_52) { return bits_as<double>(below_2_52 | 0x4330000000000000) - 0x1p52; }
template <int kBits>
PHX_RANDOM_FN double unit(uint64_t word) {
  static_assert(kBits == 53, "a double");
  return whole(word >> 38) * 0x1p-26 + whole((word >> 11) & 0x7ffffff) * 0x1p-53;
}

// In (0, 1]: (k + 1/2) * 2^-31, rounded; (k + 1/2) * 2^-52.
PHX_RANDOM_FN float positive(uint32_t word) {
  return (static_cast<float>(static_cast<int32_t>(word >> 1)) + 0.5f) * 0x1p-31f;
}
PHX_RANDOM_FN double positive(uint64_t word) { return (whole(word >> 12) + 0.5) * 0x1p-52; }

// -log(x) for x in (0, 1], from log(m) = 2 artanh((m - 1) / (m + 1)) for x = m * 2^e with m near 1. The error is less
// than 3 units in the last place.
PHX_RANDOM_FN float minus_log(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  const int32_t e = static_cast<int32_t>(bits - 0x3f3504f3) >> 23;  // the bits of sqrt(1/2)
  const float m = bits_as<float>(bits - (static_cast<uint32_t>(e) << 23));
  const float s = (m - 1.0f) / (m + 1.0f), z = s * s;
  const float p = polynomial(z, 2.0f, 0.666666667f, 0.4f, 0.285714286f, 0.222222222f);
  const float scale = static_cast<float>(-e);
  return scale * 0.693145751953125f + (scale * 1.42860677e-6f - s * p);  // log(2) in two parts
}
PHX_RANDOM_FN double minus_log(double x) {
  const uint64_t bits = bits_as<uint64_t>(x);
  const uint64_t biased = (bits - 0x3fe6a09e667f3bcd + 0x3ff0000000000000) >> 52;
  const double m = bits_as<double>(bits - ((biased - 1023) << 52));
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  const double p = polynomial(z, 2.0, 2.0 / 3, 2.0 / 5, 2.0 / 7, 2.0 / 9, 2.0 / 11, 2.0 / 13, 2.0 / 15, 2.0 / 17,
                              2.0 / 19, 2.0 / 21);
  const double scale = 1023.0 - whole(biased);
  return scale * 0x1.62e42fefa3800p-1 + (scale * 0x1.ef35793c76730p-45 - s * p);
}

template <class Real>
struct Pair {
  Real first, second;
};

// (cos, sin) of the angle 2 pi * word / 2^32 (or 2^64). The rest of the angle after the nearest quarter turn is in
// [-pi/4, pi/4], where Taylor's series are short. Of 64 bits, the upper 54 are used. The error is less than 2 units in
// the last place of 1.
template <class Real>
PHX_RANDOM_FN Pair<Real> turned(Real cos, Real sin, uint32_t quarter) {
  const Real x = (quarter & 1) != 0 ? sin : cos, y = (quarter & 1) != 0 ? cos : sin;
  return {((quarter + 1) & 2) != 0 ? -x : x, (quarter & 2) != 0 ? -y : y};
}
PHX_RANDOM_FN Pair<float> turn(uint32_t word) {
  const uint32_t quarter = (word + 0x20000000) >> 30;
  const float t = static_cast<float>(static_cast<int32_t>(word - (quarter << 30))) * 1.46291808e-9f, z = t * t;
  const float sin = t + t * z * polynomial(z, -1.0f / 6, 1.0f / 120, -1.0f / 5040, 1.0f / 362880);
  const float cos = polynomial(z, 1.0f, -1.0f / 2, 1.0f / 24, -1.0f / 720, 1.0f / 40320, -1.0f / 3628800);
  return turned(cos, sin, quarter);
}
PHX_RANDOM_FN Pair<double> turn(uint64_t word) {
  const uint64_t quarter = (word + 0x2000000000000000) >> 62;
  // The rest, which is signed, divided by 2^10: biased so that it is a positive integer below 2^52.
  const uint64_t biased = (word - (quarter << 62) + 0x2000000000000000) >> 10;
  const double t = (whole(biased) - 0x1p51) * (6.283185307179586476925 * 0x1p-54), z = t * t;
  const double sin = t + t * z *
                             polynomial(z, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800,
                                        1.0 / 6227020800, -1.0 / 1307674368000, 1.0 / 355687428096000);
  const double cos = polynomial(z, 1.0, -1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600,
                                -1.0 / 87178291200, 1.0 / 20922789888000, -1.0 / 6402373705728000);
  return turned(cos, sin, static_cast<uint32_t>(quarter));
}

// exp(x), from x = k * log(2) + r with r in [-log(2) / 2, log(2) / 2]. The error is less than 2 units in the last
// place. A result that is too small or too large for a normal number is 0 or infinity.
PHX_RANDOM_FN float exponential(float x) {
  const float k = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const float r = (x - k * 0.693145751953125f) - k * 1.42860677e-6f;
  const float p = 1.0f + (r + r * r * polynomial(r, 0.5f, 1.0f / 6, 1.0f / 24, 1.0f / 120, 1.0f / 720, 1.0f / 5040));
  const float bounded = k < -126.0f ? -126.0f : (k > 127.0f ? 127.0f : k);
  const float power = bits_as<float>(static_cast<uint32_t>(static_cast<int32_t>(bounded) + 127) << 23);
  const float value = p * power;
  return k < -126.0f ? 0.0f : (k > 127.0f ? bits_as<float>(uint32_t{0x7f800000}) : value);
}
PHX_RANDOM_FN double exponential(double x) {
  const double k = (x * 1.4426950408889634074 + 0x1.8p52) - 0x1.8p52;
  const double r = (x - k * 0x1.62e42fefa3800p-1) - k * 0x1.ef35793c76730p-45;
  const double p =
      1.0 + (r + r * r *
                     polynomial(r, 0.5, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880,
                                1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800));
  const double bounded = k < -1022.0 ? -1022.0 : (k > 1023.0 ? 1023.0 : k);
  const double power = bits_as<double>(static_cast<uint64_t>(static_cast<int64_t>(bounded) + 1023) << 52);
  const double value = p * power;
  return k < -1022.0 ? 0.0 : (k > 1023.0 ? bits_as<double>(uint64_t{0x7ff0000000000000}) : value);
}

PHX_RANDOM_FN float root(float x) { return sqrtf(x); }
PHX_RANDOM_FN double root(double x) { return sqrt(x); }

// Two independent standard normal numbers (Box and Muller, 1958), of magnitudes up to 6.7 in float and 8.6 in double.
template <class Real, class Word>
PHX_RANDOM_FN Pair<Real> normals(Word first, Word second) {
  const Real radius = root(Real(2) * minus_log(positive(first)));
  const Pair<Real> at = turn(second);
  return {radius * at.first, radius * at.second};
}

// The tangent of a uniform angle is a standard Cauchy number. Bit 10, the last one that turn() uses of 64, is set to
// keep the angle off the poles.
template <class Real, class Word>
PHX_RANDOM_FN Real cauchy(Word word) {
  const Pair<Real> at = turn(Word(word | 1024));
  return at.second / at.first;
}

// The upper 64 bits of the product.
PHX_RANDOM_FN uint64_t upper_product(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

}  // namespace
}  // namespace phx::random
