// Elements and ops of the reductions, one number at a time, in plain C++: for every processor, for GPUs, and as the
// reference for the vector kernels. The results have the same bits wherever this is compiled without contraction
// (-ffp-contract=off, nvcc --fmad=false).
//
// See select.h for why everything is in an unnamed namespace.
#pragma once

#include <cstring>

#include "base/portable.h"
#include "kernels/select.h"

namespace phx::kernels {
namespace {

template <class To, class From>
PHX_PORTABLE inline To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "not the same number of bits");
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

// ---- elements: memory to accumulators and back ------------------------------------------------------------------

template <class E>
struct Element {
  using Raw = E;
  using Acc = E;
  PHX_PORTABLE static Acc widen(Raw raw) { return raw; }
  PHX_PORTABLE static Raw narrow(Acc acc) { return acc; }
};

template <>
struct Element<Bool> {
  using Raw = uint8_t;
  using Acc = uint8_t;
  // Any byte but 0 is true.
  PHX_PORTABLE static Acc widen(Raw raw) { return raw != 0; }
  PHX_PORTABLE static Raw narrow(Acc acc) { return acc; }
};

// Which NaN an operation returns depends on the processor and the compiler, so every NaN becomes this one.
constexpr uint32_t kNan32 = 0x7fc00000;
constexpr uint64_t kNan64 = 0x7ff8000000000000;

template <>
struct Element<float> {
  using Raw = uint32_t;
  using Acc = float;
  PHX_PORTABLE static Acc widen(Raw raw) { return bits_as<float>(raw); }
  PHX_PORTABLE static Raw narrow(Acc acc) {
    const uint32_t bits = bits_as<uint32_t>(acc);
    return (bits & 0x7fffffff) > 0x7f800000 ? kNan32 : bits;
  }
};

template <>
struct Element<double> {
  using Raw = uint64_t;
  using Acc = double;
  PHX_PORTABLE static Acc widen(Raw raw) { return bits_as<double>(raw); }
  PHX_PORTABLE static Raw narrow(Acc acc) {
    const uint64_t bits = bits_as<uint64_t>(acc);
    return (bits & 0x7fffffffffffffff) > 0x7ff0000000000000 ? kNan64 : bits;
  }
};

template <>
struct Element<BF16> {
  using Raw = uint16_t;
  using Acc = float;
  PHX_PORTABLE static Acc widen(Raw raw) { return bits_as<float>(static_cast<uint32_t>(raw) << 16); }
  // Rounds to nearest even; the carry turns values that are too large into infinity.
  PHX_PORTABLE static Raw narrow(Acc acc) {
    const uint32_t bits = Element<float>::narrow(acc);
    return static_cast<Raw>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

// Returns `x < limit ? a : b` for x and limit below 2^31. It is not written like that for processors, because
// compilers would branch around the floating-point arithmetic of the other case, and then could not vectorize it.
PHX_PORTABLE inline uint32_t below(uint32_t x, uint32_t limit, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return x < limit ? a : b;
#else
  const uint32_t mask = 0u - ((x - limit) >> 31);
  return (a & mask) | (b & ~mask);
#endif
}

// f16 has 5 bits of exponent, biased by 15, and 10 of fraction; f32 has 8, biased by 127, and 23.
template <>
struct Element<F16> {
  using Raw = uint16_t;
  using Acc = float;
  PHX_PORTABLE static Acc widen(Raw raw) {
    const uint32_t wide = raw, sign = (wide & 0x8000u) << 16, magnitude = (wide & 0x7fffu) << 13;
    // A subnormal has no leading 1: this adds a 1 with the exponent of the smallest normal, and subtracts it again. No
    // f32 in between is subnormal, so a thread that flushes subnormals gets the same result.
    const float subnormal = bits_as<float>(magnitude + (113u << 23)) - 0x1p-14f;
    const uint32_t rebias = below(magnitude, 31u << 23, 112u << 23, 224u << 23);  // exponent 31 (inf, NaN) becomes 255
    return bits_as<float>(below(magnitude, 1u << 23, bits_as<uint32_t>(subnormal), magnitude + rebias) | sign);
  }
  PHX_PORTABLE static Raw narrow(Acc acc) {
    const uint32_t bits = bits_as<uint32_t>(acc), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    const uint32_t normal = ((magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13) - (112u << 10);
    // The last bit of 0.5 is worth the smallest f16, so the processor rounds the sum to a multiple of that.
    const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - bits_as<uint32_t>(0.5f);
    uint32_t result = below(magnitude, 113u << 23, subnormal, normal);
    result = below(magnitude, 0x477ff000u, result, 0x7c00u);  // 65520, halfway from the largest f16 to 65536
    return static_cast<Raw>(below(magnitude, 0x7f800001u, result | sign, 0x7e00u));
  }
};

// 5 bits of exponent as in f16, and 2 of fraction.
template <>
struct Element<F8E5M2> {
  using Raw = uint8_t;
  using Acc = float;
  PHX_PORTABLE static Acc widen(Raw raw) { return Element<F16>::widen(static_cast<uint16_t>(raw << 8)); }
  PHX_PORTABLE static Raw narrow(Acc acc) {
    const uint32_t bits = bits_as<uint32_t>(acc), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    const uint32_t normal = ((magnitude + 0xfffff + ((magnitude >> 21) & 1)) >> 21) - (112u << 2);
    const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0x1p7f) - bits_as<uint32_t>(0x1p7f);
    uint32_t result = below(magnitude, 113u << 23, subnormal, normal);
    result = below(magnitude, 0x47700000u, result, 0x7cu);  // 61440, halfway from the largest to 65536
    return static_cast<Raw>(below(magnitude, 0x7f800001u, result | sign, 0x7fu));
  }
};

// 4 bits of exponent, biased by 7, and 3 of fraction. There is no infinity: the largest exponent is one of numbers,
// except that its largest fraction is NaN.
template <>
struct Element<F8E4M3> {
  using Raw = uint8_t;
  using Acc = float;
  PHX_PORTABLE static Acc widen(Raw raw) {
    const uint32_t wide = raw, sign = (wide & 0x80u) << 24, magnitude = (wide & 0x7fu) << 20;
    const float subnormal = bits_as<float>(magnitude + (121u << 23)) - 0x1p-6f;
    const uint32_t normal = below(magnitude, 0x7fu << 20, magnitude + (120u << 23), kNan32);
    return bits_as<float>(below(magnitude, 1u << 23, bits_as<uint32_t>(subnormal), normal) | sign);
  }
  PHX_PORTABLE static Raw narrow(Acc acc) {
    const uint32_t bits = bits_as<uint32_t>(acc), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    const uint32_t normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120u << 3);
    const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0x1p14f) - bits_as<uint32_t>(0x1p14f);
    const uint32_t result = below(magnitude, 121u << 23, subnormal, normal);
    // There is no infinity: values above 464, where rounding to the largest number, 448, ends, become 448 as well.
    const uint32_t above = below(magnitude, 0x7f800001u, 0x7eu | sign, 0x7fu);
    return static_cast<Raw>(below(magnitude, 0x43e80001u, result | sign, above));
  }
};

template <class T>
struct Element<Complex<T>> {
  using Raw = Complex<typename Element<T>::Raw>;
  using Acc = Complex<T>;
  PHX_PORTABLE static Acc widen(Raw raw) { return {Element<T>::widen(raw.re), Element<T>::widen(raw.im)}; }
  PHX_PORTABLE static Raw narrow(Acc acc) { return {Element<T>::narrow(acc.re), Element<T>::narrow(acc.im)}; }
};

// ---- ops ---------------------------------------------------------------------------------------------------------

// The type in which T wraps around. It is not T itself if T is narrower than int, because that is promoted to int.
template <class T>
using Wrap = std::conditional_t<std::is_floating_point_v<T>, T, UnsignedOf<(sizeof(T) < 4 ? 4 : sizeof(T))>>;

template <class T>
PHX_PORTABLE inline T smaller(T a, T b) {
  return a < b ? a : b;
}
// IEEE 754-2019 minimum: -0 is less than +0, and the result is NaN if an operand is. `a < b ? a : b` gives b if the two
// are equal or one is NaN. So the two orders of the operands agree, except that they give both of -0 and +0, whose `or`
// is -0, and both of a NaN and a number, whose `or` is a NaN.
PHX_PORTABLE inline float smaller(float a, float b) {
  return bits_as<float>(bits_as<uint32_t>(a < b ? a : b) | bits_as<uint32_t>(b < a ? b : a));
}
PHX_PORTABLE inline double smaller(double a, double b) {
  return bits_as<double>(bits_as<uint64_t>(a < b ? a : b) | bits_as<uint64_t>(b < a ? b : a));
}
template <class T>
PHX_PORTABLE inline T larger(T a, T b) {
  return a > b ? a : b;
}
PHX_PORTABLE inline float larger(float a, float b) { return -smaller(-a, -b); }
PHX_PORTABLE inline double larger(double a, double b) { return -smaller(-a, -b); }

// prepare() is applied to each input, combine() to two values, and finish() to the result.
template <class T, class Op>
struct Combine {
  PHX_PORTABLE Combine(int64_t, double) {}
  PHX_PORTABLE T prepare(T x) const { return x; }
  PHX_PORTABLE T combine(T a, T x) const {
    if constexpr (kIsComplex<T>) {
      static_assert(std::is_same_v<Op, Product>, "other ops work on components");
      // Each product and each sum is rounded separately, which -ffp-contract=off in core/CMakeLists.txt ensures.
      return {a.re * x.re - a.im * x.im, a.re * x.im + a.im * x.re};
    } else if constexpr (std::is_same_v<Op, Sum>) {
      return static_cast<T>(static_cast<Wrap<T>>(a) + static_cast<Wrap<T>>(x));
    } else if constexpr (std::is_same_v<Op, Product>) {
      return static_cast<T>(static_cast<Wrap<T>>(a) * static_cast<Wrap<T>>(x));
    } else if constexpr (std::is_same_v<Op, Minimum>) {
      return smaller(a, x);
    } else if constexpr (std::is_same_v<Op, Maximum>) {
      return larger(a, x);
    } else if constexpr (std::is_same_v<Op, BitAnd>) {
      return a & x;
    } else if constexpr (std::is_same_v<Op, BitOr>) {
      return a | x;
    } else {
      static_assert(std::is_same_v<Op, BitXor>, "unknown op");
      return a ^ x;
    }
  }
  PHX_PORTABLE T finish(T a) const { return a; }
};

template <class T>
struct Combine<T, PremulSum> : Combine<T, Sum> {
  PHX_PORTABLE Combine(int64_t divisor, double scale)
      : Combine<T, Sum>(divisor, scale), scale_(static_cast<T>(scale)) {}
  PHX_PORTABLE T prepare(T x) const { return x * scale_; }
  const T scale_;
};

template <class T>
struct Combine<T, Average> : Combine<T, Sum> {
  // Integers are divided in 64 bits, because the divisor may not fit in T.
  using Divisor = std::conditional_t<std::is_floating_point_v<T> || std::is_same_v<T, uint64_t>, T, int64_t>;
  PHX_PORTABLE Combine(int64_t divisor, double scale)
      : Combine<T, Sum>(divisor, scale), divisor_(static_cast<Divisor>(divisor)) {}
  PHX_PORTABLE T finish(T a) const { return static_cast<T>(a / divisor_); }
  const Divisor divisor_;
};

}  // namespace
}  // namespace phx::kernels
