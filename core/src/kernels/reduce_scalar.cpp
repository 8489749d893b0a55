// The kernels in plain C++: for every processor, and the reference for the others.
//
// Chunk by chunk through accumulators that stay in the first-level cache, in loops without branches, which compilers
// turn into whatever vector instructions their target always has (SSE2, NEON).
#include <cstring>

#include "kernels/select.h"

namespace phx::kernels {
namespace {

template <class To, class From>
inline To bits_as(From value) {
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
  static Acc widen(Raw raw) { return raw; }
  static Raw narrow(Acc acc) { return acc; }
};

template <>
struct Element<Bool> {
  using Raw = uint8_t;
  using Acc = uint8_t;
  // Whoever filled the byte may take any value but 0 for true.
  static Acc widen(Raw raw) { return raw != 0; }
  static Raw narrow(Acc acc) { return acc; }
};

// Which NaN an operation returns is the processor's and the compiler's choice, so all become this one.
constexpr uint32_t kNan32 = 0x7fc00000;
constexpr uint64_t kNan64 = 0x7ff8000000000000;

template <>
struct Element<float> {
  using Raw = uint32_t;
  using Acc = float;
  static Acc widen(Raw raw) { return bits_as<float>(raw); }
  static Raw narrow(Acc acc) {
    const uint32_t bits = bits_as<uint32_t>(acc);
    return (bits & 0x7fffffff) > 0x7f800000 ? kNan32 : bits;
  }
};

template <>
struct Element<double> {
  using Raw = uint64_t;
  using Acc = double;
  static Acc widen(Raw raw) { return bits_as<double>(raw); }
  static Raw narrow(Acc acc) {
    const uint64_t bits = bits_as<uint64_t>(acc);
    return (bits & 0x7fffffffffffffff) > 0x7ff0000000000000 ? kNan64 : bits;
  }
};

template <>
struct Element<BF16> {
  using Raw = uint16_t;
  using Acc = float;
  static Acc widen(Raw raw) { return bits_as<float>(static_cast<uint32_t>(raw) << 16); }
  // To nearest even; the carry makes infinity of what is too large.
  static Raw narrow(Acc acc) {
    const uint32_t bits = Element<float>::narrow(acc);
    return static_cast<Raw>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

// `x < limit ? a : b` for x and limit below 2^31. Not written so: compilers would branch around the floating-point
// arithmetic of the other case, which keeps them from vectorizing.
inline uint32_t below(uint32_t x, uint32_t limit, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - ((x - limit) >> 31);
  return (a & mask) | (b & ~mask);
}

// f16 has 5 bits of exponent, biased by 15, and 10 of fraction; f32 has 8, biased by 127, and 23.
template <>
struct Element<F16> {
  using Raw = uint16_t;
  using Acc = float;
  static Acc widen(Raw raw) {
    const uint32_t wide = raw, sign = (wide & 0x8000u) << 16, magnitude = (wide & 0x7fffu) << 13;
    // A subnormal has no leading 1: give it one with the exponent of the smallest normal, and take it off again. No f32
    // in this is subnormal, so a thread that flushes those gets the same.
    const float subnormal = bits_as<float>(magnitude + (113u << 23)) - 0x1p-14f;
    const uint32_t rebias = below(magnitude, 31u << 23, 112u << 23, 224u << 23);  // 31, of inf and NaN, becomes 255
    return bits_as<float>(below(magnitude, 1u << 23, bits_as<uint32_t>(subnormal), magnitude + rebias) | sign);
  }
  static Raw narrow(Acc acc) {
    const uint32_t bits = bits_as<uint32_t>(acc), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    const uint32_t normal = ((magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13) - (112u << 10);
    // Added to 0.5, whose last bit is worth the smallest f16, the processor rounds it to a multiple of that.
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
  static Acc widen(Raw raw) { return Element<F16>::widen(static_cast<uint16_t>(raw << 8)); }
  static Raw narrow(Acc acc) {
    const uint32_t bits = bits_as<uint32_t>(acc), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    const uint32_t normal = ((magnitude + 0xfffff + ((magnitude >> 21) & 1)) >> 21) - (112u << 2);
    const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0x1p7f) - bits_as<uint32_t>(0x1p7f);
    uint32_t result = below(magnitude, 113u << 23, subnormal, normal);
    result = below(magnitude, 0x47700000u, result, 0x7cu);  // 61440, halfway from the largest to 65536
    return static_cast<Raw>(below(magnitude, 0x7f800001u, result | sign, 0x7fu));
  }
};

// 4 bits of exponent, biased by 7, and 3 of fraction. No infinity: the largest exponent is one of numbers, but for the
// last fraction, which is NaN.
template <>
struct Element<F8E4M3> {
  using Raw = uint8_t;
  using Acc = float;
  static Acc widen(Raw raw) {
    const uint32_t wide = raw, sign = (wide & 0x80u) << 24, magnitude = (wide & 0x7fu) << 20;
    const float subnormal = bits_as<float>(magnitude + (121u << 23)) - 0x1p-6f;
    const uint32_t normal = below(magnitude, 0x7fu << 20, magnitude + (120u << 23), kNan32);
    return bits_as<float>(below(magnitude, 1u << 23, bits_as<uint32_t>(subnormal), normal) | sign);
  }
  static Raw narrow(Acc acc) {
    const uint32_t bits = bits_as<uint32_t>(acc), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    const uint32_t normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120u << 3);
    const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0x1p14f) - bits_as<uint32_t>(0x1p14f);
    const uint32_t result = below(magnitude, 121u << 23, subnormal, normal);
    // What is more than 464, halfway beyond the largest, 448, becomes that: there is no infinity.
    const uint32_t above = below(magnitude, 0x7f800001u, 0x7eu | sign, 0x7fu);
    return static_cast<Raw>(below(magnitude, 0x43e80001u, result | sign, above));
  }
};

template <class T>
struct Element<Complex<T>> {
  using Raw = Complex<typename Element<T>::Raw>;
  using Acc = Complex<T>;
  static Acc widen(Raw raw) { return {Element<T>::widen(raw.re), Element<T>::widen(raw.im)}; }
  static Raw narrow(Acc acc) { return {Element<T>::narrow(acc.re), Element<T>::narrow(acc.im)}; }
};

// ---- ops ---------------------------------------------------------------------------------------------------------

// The type in which T wraps around. Not T itself where that is narrower than int: it would be promoted to int.
template <class T>
struct WrapOf {
  using Type = typename UnsignedOf<(sizeof(T) < 4 ? 4 : sizeof(T))>::Type;
};
template <>
struct WrapOf<float> {
  using Type = float;
};
template <>
struct WrapOf<double> {
  using Type = double;
};
template <class T>
using Wrap = typename WrapOf<T>::Type;

template <class T>
inline T smaller(T a, T b) {
  return a < b ? a : b;
}
// IEEE 754-2019 minimum: -0 below +0, and NaN when one is. smaller() gives b for equals and NaN, so its two orders
// agree except that of -0 and +0 they give both, whose `or` is -0, and of a NaN and a number both, whose `or` is a NaN.
inline float smaller(float a, float b) {
  return bits_as<float>(bits_as<uint32_t>(a < b ? a : b) | bits_as<uint32_t>(b < a ? b : a));
}
inline double smaller(double a, double b) {
  return bits_as<double>(bits_as<uint64_t>(a < b ? a : b) | bits_as<uint64_t>(b < a ? b : a));
}
template <class T>
inline T larger(T a, T b) {
  return a > b ? a : b;
}
inline float larger(float a, float b) { return -smaller(-a, -b); }
inline double larger(double a, double b) { return -smaller(-a, -b); }

// prepare() is done to each input, finish() to the result.
template <class T>
struct Unchanged {
  Unchanged(int64_t, double) {}
  T prepare(T x) const { return x; }
  T finish(T a) const { return a; }
};
template <class T, class Op>
struct Combine;
template <class T>
struct Combine<T, Sum> : Unchanged<T> {
  using Unchanged<T>::Unchanged;
  T combine(T a, T x) const { return static_cast<T>(static_cast<Wrap<T>>(a) + static_cast<Wrap<T>>(x)); }
};
template <class T>
struct Combine<T, Product> : Unchanged<T> {
  using Unchanged<T>::Unchanged;
  T combine(T a, T x) const { return static_cast<T>(static_cast<Wrap<T>>(a) * static_cast<Wrap<T>>(x)); }
};
template <class T>
struct Combine<Complex<T>, Product> : Unchanged<Complex<T>> {
  using Unchanged<Complex<T>>::Unchanged;
  // Each product and each sum rounded by itself: -ffp-contract=off, in core/CMakeLists.txt, sees to it.
  Complex<T> combine(Complex<T> a, Complex<T> x) const {
    return {a.re * x.re - a.im * x.im, a.re * x.im + a.im * x.re};
  }
};
template <class T>
struct Combine<T, Minimum> : Unchanged<T> {
  using Unchanged<T>::Unchanged;
  T combine(T a, T x) const { return smaller(a, x); }
};
template <class T>
struct Combine<T, Maximum> : Unchanged<T> {
  using Unchanged<T>::Unchanged;
  T combine(T a, T x) const { return larger(a, x); }
};
template <class T>
struct Combine<T, BitAnd> : Unchanged<T> {
  using Unchanged<T>::Unchanged;
  T combine(T a, T x) const { return a & x; }
};
template <class T>
struct Combine<T, BitOr> : Unchanged<T> {
  using Unchanged<T>::Unchanged;
  T combine(T a, T x) const { return a | x; }
};
template <class T>
struct Combine<T, BitXor> : Unchanged<T> {
  using Unchanged<T>::Unchanged;
  T combine(T a, T x) const { return a ^ x; }
};

template <class T>
struct Combine<T, PremulSum> : Combine<T, Sum> {
  Combine(int64_t divisor, double scale) : Combine<T, Sum>(divisor, scale), scale_(static_cast<T>(scale)) {}
  T prepare(T x) const { return x * scale_; }
  const T scale_;
};

// Divided in 64 bits: the divisor may not fit in T.
template <class T>
struct DivisorOf {
  using Type = int64_t;
};
template <>
struct DivisorOf<uint64_t> {
  using Type = uint64_t;
};
template <>
struct DivisorOf<float> {
  using Type = float;
};
template <>
struct DivisorOf<double> {
  using Type = double;
};
template <class T>
struct Combine<T, Average> : Combine<T, Sum> {
  using Divisor = typename DivisorOf<T>::Type;
  Combine(int64_t divisor, double scale) : Combine<T, Sum>(divisor, scale), divisor_(static_cast<Divisor>(divisor)) {}
  T finish(T a) const { return static_cast<T>(a / divisor_); }
  const Divisor divisor_;
};

// ---- the loop ---------------------------------------------------------------------------------------------------

template <class E>
inline typename Element<E>::Acc load(const char *from, size_t i) {
  typename Element<E>::Raw raw;
  std::memcpy(&raw, from + i * sizeof raw, sizeof raw);  // alignment is not promised
  return Element<E>::widen(raw);
}
template <class E>
inline void store(char *to, size_t i, typename Element<E>::Acc acc) {
  const typename Element<E>::Raw raw = Element<E>::narrow(acc);
  std::memcpy(to + i * sizeof raw, &raw, sizeof raw);
}

// Each loop is a function of its own, or GCC 12 takes them for one nest, interchanges them, and vectorizes nothing.
template <class E, class Acc, class Op>
__attribute__((noinline)) void begin(Acc *__restrict sum, const char *__restrict from, size_t length, const Op &op) {
  for (size_t i = 0; i < length; ++i) sum[i] = op.prepare(load<E>(from, i));
}
template <class E, class Acc, class Op>
__attribute__((noinline)) void add(Acc *__restrict sum, const char *__restrict from, size_t length, const Op &op) {
  for (size_t i = 0; i < length; ++i) sum[i] = op.combine(sum[i], op.prepare(load<E>(from, i)));
}
template <class E, class Acc, class Op>
__attribute__((noinline)) void end(const Acc *__restrict sum, char *__restrict to, size_t length, const Op &op) {
  for (size_t i = 0; i < length; ++i) store<E>(to, i, op.finish(sum[i]));
}

template <bool kIntoAll>
struct ScalarKernels {
  template <class E, class Op>
  static void run(void *out, const void *const *in, int n, size_t count, int64_t divisor, double scale) {
    using Acc = typename Element<E>::Acc;
    const Combine<Acc, Op> op(divisor, scale);
    constexpr size_t kChunk = 256;
    Acc sum[kChunk];
    for (size_t at = 0; at < count; at += kChunk) {
      const size_t length = count - at < kChunk ? count - at : kChunk;
      const size_t offset = at * sizeof(typename Element<E>::Raw);
      begin<E>(sum, static_cast<const char *>(in[0]) + offset, length, op);
      for (int k = 1; k < n; ++k) add<E>(sum, static_cast<const char *>(in[k]) + offset, length, op);
      if (!kIntoAll) end<E>(sum, static_cast<char *>(out) + offset, length, op);
      for (int k = 0; kIntoAll && k < n; ++k)
        end<E>(sum, static_cast<char *>(const_cast<void *>(in[k])) + offset, length, op);
    }
  }
};

}  // namespace

ReduceFn find_scalar(int32_t dtype, int32_t op) { return select<ScalarKernels<false>>(dtype, op); }
ReduceFn find_scalar_into_all(int32_t dtype, int32_t op) { return select<ScalarKernels<true>>(dtype, op); }

}  // namespace phx::kernels
