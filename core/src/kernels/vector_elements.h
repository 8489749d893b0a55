// Elements as vectors of any width: converts elements in memory to accumulators and accumulators to elements. And the
// reduce ops on vectors of accumulators.
//
// Written with the vector extensions of GCC and Clang, so that arithmetic reads as arithmetic and the compiler picks
// the instructions. Each instruction set supplies the few operations that the extensions do not have (see
// reduce_avx2.cpp). See select.h for why everything is in an unnamed namespace.
#pragma once

#include <cstring>

#include "kernels/select.h"

#define PHX_ALWAYS_INLINE inline __attribute__((always_inline))

namespace phx::kernels {
namespace {

template <class T, int kBytes>
struct Vector {
  typedef T Type __attribute__((vector_size(kBytes)));
  typedef T Unaligned __attribute__((vector_size(kBytes), aligned(1), may_alias));

  static PHX_ALWAYS_INLINE Type load(const char *from) { return *reinterpret_cast<const Unaligned *>(from); }
  static PHX_ALWAYS_INLINE void store(char *to, Type v) { *reinterpret_cast<Unaligned *>(to) = v; }
};

// ---- elements: memory to accumulators and back ------------------------------------------------------------------

// One step takes kBytes of memory, kElement bytes each, into kVectors vectors of accumulators of type Acc.
template <class Isa, class E>
struct Lanes {
  using Acc = E;
  using V = Vector<E, Isa::kBytes>;
  static constexpr int kElement = sizeof(E), kBytes = Isa::kBytes, kVectors = 1;

  static PHX_ALWAYS_INLINE void load(typename V::Type *v, const char *from) { v[0] = V::load(from); }
  static PHX_ALWAYS_INLINE void store(char *to, const typename V::Type *v) {
    if constexpr (std::is_floating_point_v<E>) {
      V::store(to, Isa::canonical(v[0]));
    } else {
      V::store(to, v[0]);
    }
  }
};

template <class Isa>
struct Lanes<Isa, Bool> : Lanes<Isa, uint8_t> {
  using typename Lanes<Isa, uint8_t>::V;
  // Any byte but 0 is true.
  static PHX_ALWAYS_INLINE void load(typename V::Type *v, const char *from) {
    const typename V::Type raw = V::load(from), one = typename V::Type{} + 1;
    v[0] = raw < one ? raw : one;
  }
};

// Accumulated in f32. For two inputs, vaddph of AVX512-FP16 would give the same bits, because the significand of f32
// has more than twice the bits of that of f16. But it is faster only in the first two cache levels (107 against 67 GB/s
// in the second, 28 against 28 in the third), where a peer's input never is.
template <class Isa>
struct Lanes<Isa, F16> {
  using Acc = float;
  using V = Vector<float, Isa::kBytes>;
  static constexpr int kElement = 2, kBytes = Isa::kBytes / 2, kVectors = 1;

  static PHX_ALWAYS_INLINE void load(typename V::Type *v, const char *from) { v[0] = Isa::widen_f16(from); }
  static PHX_ALWAYS_INLINE void store(char *to, const typename V::Type *v) {
    Isa::narrow_f16(to, Isa::canonical(v[0]));
  }
};

// A bf16 is the upper half of an f32. A vector of pairs is split into the even and the odd elements, and joined again,
// with shifts and masks. That saves the lane crossings that elements in order would need.
template <class Isa>
struct Lanes<Isa, BF16> {
  using Acc = float;
  using V = Vector<float, Isa::kBytes>;
  using Bits = Vector<uint32_t, Isa::kBytes>;
  static constexpr int kElement = 2, kBytes = Isa::kBytes, kVectors = 2;

  static PHX_ALWAYS_INLINE void load(typename V::Type *v, const char *from) {
    const typename Bits::Type pair = Bits::load(from);
    v[0] = (typename V::Type)(pair << 16);
    v[1] = (typename V::Type)(pair & 0xffff0000u);
  }
  static PHX_ALWAYS_INLINE void store(char *to, const typename V::Type *v) {
    Bits::store(to, (rounded(v[0]) >> 16) | (rounded(v[1]) & 0xffff0000u));
  }

 private:
  // Rounds to nearest even in the upper half. The carry turns values that are too large into infinity, and the
  // canonical NaN keeps its upper half. vcvtne2ps2bf16 is not used, because it treats denormals as zeros. It is no
  // faster even so (two inputs, on a Sapphire Rapids: 57 against 52 GB/s in the first-level cache, 60 against 62 in the
  // second), and slower with a test for denormals (40 and 44). vdpbf16ps treats them as zeros too, and adds two
  // products before it rounds.
  static PHX_ALWAYS_INLINE typename Bits::Type rounded(typename V::Type v) {
    const typename Bits::Type bits = (typename Bits::Type)Isa::canonical(v);
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  }
};

// f8 passes through f16 on its way between memory and f32, because f16 has all values of both kinds of f8 (those of
// e4m3 are 2^8 times smaller there). A vector of pairs is split as for bf16.
template <class Isa>
struct E5M2 {
  using Halves = typename Vector<uint16_t, Isa::kBytes>::Type;
  // 2 bits of fraction; 2^-14 is the smallest normal. Values that round to 2^16 become infinity in f16.
  static constexpr int kFraction = 2, kExponent = 113;

  // Converts elements in the upper bytes of halves, whose lower bytes are 0, to f16 and back.
  static PHX_ALWAYS_INLINE Halves widen(Halves raw) { return raw; }
  static PHX_ALWAYS_INLINE Halves narrow(Halves f16) { return f16 & (uint16_t)0xff00; }
  static constexpr int32_t kMost = 0x7f800000;  // infinity
  static constexpr float kScale = 1;
};
template <class Isa>
struct E4M3 {
  using Halves = typename Vector<uint16_t, Isa::kBytes>::Type;
  using Signed = typename Vector<int16_t, Isa::kBytes>::Type;
  static constexpr int kFraction = 3, kExponent = 121;  // 2^-6 is the smallest normal
  static constexpr int32_t kMost = 0x43e00000;          // 448: there is no infinity
  static constexpr float kScale = 0x1p8f;

  static PHX_ALWAYS_INLINE Halves widen(Halves raw) {
    const Halves f16 = (Halves)((Signed)raw >> 1) & (uint16_t)0xbf80;
    return f16 | ((f16 + (uint16_t)0x80) & (uint16_t)0x4000);  // only NaN, all ones, carries into the exponent of NaNs
  }
  // The first bit of the exponent is 0, except in a NaN, whose other bits are all ones, so the shift drops it.
  static PHX_ALWAYS_INLINE Halves narrow(Halves f16) {
    return ((f16 << 1) & (uint16_t)0x7f00) | (f16 & (uint16_t)0x8000);
  }
};

template <class Isa, class Format>
struct F8Lanes {
  using Acc = float;
  using V = Vector<float, Isa::kBytes>;
  static constexpr int kElement = 1, kBytes = Isa::kBytes, kVectors = 4;

  static PHX_ALWAYS_INLINE void load(typename V::Type *v, const char *from) {
    const typename Halves::Type pair = Halves::load(from);
    const typename Halves::Type even = Format::widen(pair << 8), odd = Format::widen(pair & (uint16_t)0xff00);
    v[0] = Isa::widen_lower(even) * Format::kScale;
    v[1] = Isa::widen_upper(even) * Format::kScale;
    v[2] = Isa::widen_lower(odd) * Format::kScale;
    v[3] = Isa::widen_upper(odd) * Format::kScale;
  }
  static PHX_ALWAYS_INLINE void store(char *to, const typename V::Type *v) {
    const typename Halves::Type even = (typename Halves::Type)Isa::narrow(rounded(v[0]), rounded(v[1]));
    const typename Halves::Type odd = (typename Halves::Type)Isa::narrow(rounded(v[2]), rounded(v[3]));
    Halves::store(to, (Format::narrow(even) >> 8) | Format::narrow(odd));
  }

 private:
  using Halves = Vector<uint16_t, Isa::kBytes>;
  using Bits = typename Vector<int32_t, Isa::kBytes>::Type;

  // Rounds to nearest even among the values of the format, which f16 has exactly. The sum with 1.5 * 2^(23 - kFraction)
  // times the value's own power of two, or that of the smallest normal, is rounded to kFraction bits. From 2^16 on the
  // power stays the same, so that the sum cannot overflow. A NaN becomes 0x7fff in f16.
  static PHX_ALWAYS_INLINE typename V::Type rounded(typename V::Type v) {
    const Bits absolute = (Bits)v & 0x7fffffff, sign = (Bits)v ^ absolute, largest = Bits{} + Format::kMost;
    const Bits magnitude = absolute < largest ? absolute : largest;
    const Bits least = Bits{} + (Format::kExponent << 23), most = Bits{} + (143 << 23), nan = Bits{} + 0x7fffffff;
    v = (typename V::Type)(magnitude | sign);
    Bits power = magnitude & 0x7f800000;
    power = power > least ? power : least;
    power = power < most ? power : most;
    const typename V::Type shift = (typename V::Type)(power + ((23 - Format::kFraction) << 23 | 1 << 22));
    const Bits result =
        (Bits)(((v + shift) - shift) * (1 / Format::kScale)) | sign;  // the sum loses the sign of a zero
    return (typename V::Type)(absolute > 0x7f800000 ? nan : result);
  }
};
template <class Isa>
struct Lanes<Isa, F8E4M3> : F8Lanes<Isa, E4M3<Isa>> {};
template <class Isa>
struct Lanes<Isa, F8E5M2> : F8Lanes<Isa, E5M2<Isa>> {};

// Real and imaginary parts alternate.
template <class Isa, class T>
struct Lanes<Isa, Complex<T>> : Lanes<Isa, T> {
  static constexpr int kElement = 2 * sizeof(T);
};

// ---- ops ---------------------------------------------------------------------------------------------------------

// prepare() is applied to each input, combine() to two values, and finish() to the result.
template <class Isa, class T, class Op>
struct Combine {
  Combine(int64_t, double) {}
  template <class V>
  static PHX_ALWAYS_INLINE V prepare(V x) {
    return negated(x);
  }
  template <class V>
  static PHX_ALWAYS_INLINE V combine(V a, V x) {
    if constexpr (std::is_same_v<Op, Sum>) {
      return a + x;
    } else if constexpr (std::is_same_v<Op, Product>) {
      return a * x;
    } else if constexpr (std::is_same_v<Op, BitAnd>) {
      return a & x;
    } else if constexpr (std::is_same_v<Op, BitOr>) {
      return a | x;
    } else if constexpr (std::is_same_v<Op, BitXor>) {
      return a ^ x;
    } else if constexpr (std::is_floating_point_v<T>) {
      return Isa::minimum(a, x);
    } else if constexpr (std::is_same_v<Op, Minimum>) {
      return a < x ? a : x;
    } else {
      static_assert(std::is_same_v<Op, Maximum>, "unknown op");
      return a > x ? a : x;
    }
  }
  template <class V>
  static PHX_ALWAYS_INLINE V finish(V a) {
    return negated(a);
  }

 private:
  // For floats, max(a, b) = -min(-a, -b), because the method of Isa::minimum has no equally simple counterpart.
  template <class V>
  static PHX_ALWAYS_INLINE V negated(V x) {
    if constexpr (std::is_same_v<Op, Maximum> && std::is_floating_point_v<T>) {
      return -x;
    } else {
      return x;
    }
  }
};

template <class Isa, class T>
struct Combine<Isa, T, PremulSum> : Combine<Isa, T, Sum> {
  Combine(int64_t divisor, double scale) : Combine<Isa, T, Sum>(divisor, scale), scale_(static_cast<T>(scale)) {}
  template <class V>
  PHX_ALWAYS_INLINE V prepare(V x) const {
    return x * scale_;
  }

 private:
  const T scale_;
};

// The average of integers. No instruction set divides vectors of them, so the elements pass through a small array. Up
// to 32 bits, the quotient is the product with a reciprocal that is a little too large, truncated: for dividends below
// 2^16 in float and 2^32 in double the excess never reaches the next integer, so the result is exact. 64-bit integers
// are divided one by one.
template <class Isa, class T>
struct Combine<Isa, T, Average> : Combine<Isa, T, Sum> {
  Combine(int64_t divisor, double scale) : Combine<Isa, T, Sum>(divisor, scale), divisor_(static_cast<Wide>(divisor)) {
    if (sizeof(T) <= 2) {
      reciprocal_ = static_cast<float>(1.0 / static_cast<double>(divisor)) * (1.0f + 0x1p-22f);
    } else if (sizeof(T) == 4) {
      reciprocal_ = static_cast<Real>(1.0 / static_cast<double>(divisor) * (1.0 + 0x1p-50));
    }
  }
  template <class V>
  static PHX_ALWAYS_INLINE V combine(V a, V x) {
    return (V)((UnsignedVector)a + (UnsignedVector)x);
  }
  template <class V>
  PHX_ALWAYS_INLINE V finish(V a) const {
    constexpr int kLanes = Isa::kBytes / sizeof(T);
    T lanes[kLanes];
    std::memcpy(lanes, &a, sizeof a);
    for (int i = 0; i < kLanes; ++i) {
      if constexpr (sizeof(T) == 8) {
        lanes[i] = lanes[i] / divisor_;
      } else {
        lanes[i] = static_cast<T>(static_cast<Quotient>(static_cast<Real>(lanes[i]) * reciprocal_));
      }
    }
    std::memcpy(&a, lanes, sizeof a);
    return a;
  }

 private:
  using UnsignedVector = typename Vector<Unsigned<T>, Isa::kBytes>::Type;
  using Real = std::conditional_t<(sizeof(T) <= 2), float, double>;
  using Quotient = std::conditional_t<(sizeof(T) <= 2), int32_t, T>;
  using Wide = std::conditional_t<(sizeof(T) == 8), T, int64_t>;
  const Wide divisor_;
  Real reciprocal_ = 0;
};

// The average of floats: a division, or for powers of two, where both give the same bits, a multiplication.
template <class Isa, class T, bool kMultiplies>
struct FloatAverage : Combine<Isa, T, Sum> {
  FloatAverage(int64_t divisor, double scale)
      : Combine<Isa, T, Sum>(divisor, scale),
        factor_(kMultiplies ? 1 / static_cast<T>(divisor) : static_cast<T>(divisor)) {}
  template <class V>
  PHX_ALWAYS_INLINE V finish(V a) const {
    return kMultiplies ? a * factor_ : a / factor_;
  }

 private:
  const T factor_;  // or the divisor
};

// (a + bi)(c + di) = (ac - bd) + (ad + bc)i, with each product and each sum rounded separately.
template <class Isa, class T>
struct ComplexProduct : Combine<Isa, T, Sum> {
  ComplexProduct(int64_t divisor, double scale) : Combine<Isa, T, Sum>(divisor, scale) {
    for (int i = 0; i < kLanes; ++i) minus_[i] = i % 2 == 0 ? T(-0.0) : T(0.0);
  }
  template <class V>
  PHX_ALWAYS_INLINE V combine(V a, V x) const {
    const V crossed = Isa::imaginary(a) * Isa::swapped(x);  // bd, bc
    return Isa::real(a) * x + (V)((Bits)crossed ^ (Bits)minus_);
  }

 private:
  static constexpr int kLanes = Isa::kBytes / sizeof(T);
  using Bits = typename Vector<Unsigned<T>, Isa::kBytes>::Type;
  typename Vector<T, Isa::kBytes>::Type minus_;
};

}  // namespace
}  // namespace phx::kernels
