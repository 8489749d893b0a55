// The reduce ops on vectors of accumulators.
#pragma once

#include <cstring>

#include "kernels/vector_elements.h"

namespace phx::kernels {
namespace {

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
