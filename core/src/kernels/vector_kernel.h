// The reduction loop over vectors of any width, as templates over (instruction set, element, op).
//
// Written with the vector extensions of GCC and Clang, so that arithmetic reads as arithmetic and the compiler picks
// the instructions; an instruction set supplies the few operations that the extensions cannot say (see
// reduce_avx2.cpp). See select.h for why all is in an unnamed namespace.
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
  static PHX_ALWAYS_INLINE void store(char *to, const typename V::Type *v) { V::store(to, v[0]); }
};

template <class Isa>
struct Lanes<Isa, Bool> : Lanes<Isa, uint8_t> {
  using typename Lanes<Isa, uint8_t>::V;
  // Whoever filled the byte may take any value but 0 for true.
  static PHX_ALWAYS_INLINE void load(typename V::Type *v, const char *from) {
    const typename V::Type raw = V::load(from), one = typename V::Type{} + 1;
    v[0] = raw < one ? raw : one;
  }
};

template <class Isa, class T>
struct FloatLanes {
  using Acc = T;
  using V = Vector<T, Isa::kBytes>;
  static constexpr int kElement = sizeof(T), kBytes = Isa::kBytes, kVectors = 1;

  static PHX_ALWAYS_INLINE void load(typename V::Type *v, const char *from) { v[0] = V::load(from); }
  static PHX_ALWAYS_INLINE void store(char *to, const typename V::Type *v) { V::store(to, Isa::canonical(v[0])); }
};
template <class Isa>
struct Lanes<Isa, float> : FloatLanes<Isa, float> {};
template <class Isa>
struct Lanes<Isa, double> : FloatLanes<Isa, double> {};

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

// A bf16 is the upper half of an f32. A vector of pairs is taken apart into the even and the odd elements and put
// together again with shifts and masks, which spares the lane crossings that elements in order would need.
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
  // To nearest even in the upper half. The carry makes infinity of what is too large; the canonical NaN keeps its upper
  // half. Not vcvtneps2bf16: it takes denormals for zeros.
  static PHX_ALWAYS_INLINE typename Bits::Type rounded(typename V::Type v) {
    const typename Bits::Type bits = (typename Bits::Type)Isa::canonical(v);
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  }
};

// ---- ops: prepare each input, combine, finish --------------------------------------------------------------------

struct Plain {
  template <class V>
  static PHX_ALWAYS_INLINE V prepare(V x) {
    return x;
  }
  template <class V>
  static PHX_ALWAYS_INLINE V finish(V a) {
    return a;
  }
};

template <class Isa, class T, class Op>
struct Combine;

template <class Isa, class T>
struct Combine<Isa, T, Sum> : Plain {
  Combine(int64_t, double) {}
  template <class V>
  static PHX_ALWAYS_INLINE V combine(V a, V x) {
    return a + x;
  }
};
template <class Isa, class T>
struct Combine<Isa, T, Product> : Plain {
  Combine(int64_t, double) {}
  template <class V>
  static PHX_ALWAYS_INLINE V combine(V a, V x) {
    return a * x;
  }
};
template <class Isa, class T>
struct Combine<Isa, T, BitAnd> : Plain {
  Combine(int64_t, double) {}
  template <class V>
  static PHX_ALWAYS_INLINE V combine(V a, V x) {
    return a & x;
  }
};
template <class Isa, class T>
struct Combine<Isa, T, BitOr> : Plain {
  Combine(int64_t, double) {}
  template <class V>
  static PHX_ALWAYS_INLINE V combine(V a, V x) {
    return a | x;
  }
};
template <class Isa, class T>
struct Combine<Isa, T, BitXor> : Plain {
  Combine(int64_t, double) {}
  template <class V>
  static PHX_ALWAYS_INLINE V combine(V a, V x) {
    return a ^ x;
  }
};

template <class Isa, class T>
struct Combine<Isa, T, Minimum> : Plain {
  Combine(int64_t, double) {}
  template <class V>
  static PHX_ALWAYS_INLINE V combine(V a, V x) {
    return a < x ? a : x;
  }
};
template <class Isa, class T>
struct Combine<Isa, T, Maximum> : Plain {
  Combine(int64_t, double) {}
  template <class V>
  static PHX_ALWAYS_INLINE V combine(V a, V x) {
    return a > x ? a : x;
  }
};

template <class Isa>
struct FloatMinimum : Plain {
  FloatMinimum(int64_t, double) {}
  template <class V>
  static PHX_ALWAYS_INLINE V combine(V a, V x) {
    return Isa::minimum(a, x);
  }
};
// max(a, b) = -min(-a, -b), because the trick of Isa::minimum has no such simple twin.
template <class Isa>
struct FloatMaximum : FloatMinimum<Isa> {
  using FloatMinimum<Isa>::FloatMinimum;
  template <class V>
  static PHX_ALWAYS_INLINE V prepare(V x) {
    return -x;
  }
  template <class V>
  static PHX_ALWAYS_INLINE V finish(V a) {
    return -a;
  }
};
template <class Isa>
struct Combine<Isa, float, Minimum> : FloatMinimum<Isa> {
  using FloatMinimum<Isa>::FloatMinimum;
};
template <class Isa>
struct Combine<Isa, double, Minimum> : FloatMinimum<Isa> {
  using FloatMinimum<Isa>::FloatMinimum;
};
template <class Isa>
struct Combine<Isa, float, Maximum> : FloatMaximum<Isa> {
  using FloatMaximum<Isa>::FloatMaximum;
};
template <class Isa>
struct Combine<Isa, double, Maximum> : FloatMaximum<Isa> {
  using FloatMaximum<Isa>::FloatMaximum;
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

// Integers. No instruction set divides vectors of them, so the lanes pass through a small array. Up to 32 bits the
// quotient is the product with a reciprocal that is a little too large, cut off: with dividends below 2^16 in float and
// 2^32 in double the excess never reaches the next integer, so it is exact. 64 bits are divided one by one.
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
  template <bool kFirst, class A, class B>
  struct Either {
    using Type = A;
  };
  template <class A, class B>
  struct Either<false, A, B> {
    using Type = B;
  };
  using Real = typename Either<(sizeof(T) <= 2), float, double>::Type;
  using Quotient = typename Either<(sizeof(T) <= 2), int32_t, T>::Type;
  using Wide = typename Either<(sizeof(T) == 8), T, int64_t>::Type;
  const Wide divisor_;
  Real reciprocal_ = 0;
};

// Floats: a true division, or for powers of two, where both give the same bits, a product.
template <class Isa, class T>
struct SumDivided : Combine<Isa, T, Sum> {
  SumDivided(int64_t divisor, double scale) : Combine<Isa, T, Sum>(divisor, scale), divisor_(static_cast<T>(divisor)) {}
  template <class V>
  PHX_ALWAYS_INLINE V finish(V a) const {
    return a / divisor_;
  }

 private:
  const T divisor_;
};
template <class Isa, class T>
struct SumHalved : Combine<Isa, T, Sum> {
  SumHalved(int64_t divisor, double scale)
      : Combine<Isa, T, Sum>(divisor, scale), factor_(1 / static_cast<T>(divisor)) {}
  template <class V>
  PHX_ALWAYS_INLINE V finish(V a) const {
    return a * factor_;
  }

 private:
  const T factor_;
};

// ---- the loop ---------------------------------------------------------------------------------------------------

// Where step `at` of input k is: in place, or, when the inputs are shorter than one step, in a padded copy.
struct InPlace {
  const void *const *in;
  size_t at;
  PHX_ALWAYS_INLINE const char *operator()(int k) const { return static_cast<const char *>(in[k]) + at; }
};
template <int kBytes>
struct Padded {
  const void *const *in;
  size_t bytes;
  alignas(kBytes) char copy[kBytes];
  PHX_ALWAYS_INLINE const char *operator()(int k) {
    std::memcpy(copy, in[k], bytes);
    return copy;
  }
};

// kSteps steps at once, so that their dependency chains overlap. All inputs are read before anything is written, so
// `out` may be one of them. The accumulators stay in registers whatever n is.
template <class L, int kSteps, class Op, class Where>
PHX_ALWAYS_INLINE void reduce_steps(char *out, Where &&where, int n, const Op &op) {
  constexpr int kVectors = kSteps * L::kVectors;
  typename L::V::Type sum[kVectors], x[kVectors];
  const char *from = where(0);
  for (int s = 0; s < kSteps; ++s) L::load(sum + s * L::kVectors, from + s * L::kBytes);
  for (int v = 0; v < kVectors; ++v) sum[v] = op.prepare(sum[v]);
  for (int k = 1; k < n; ++k) {
    from = where(k);
    for (int s = 0; s < kSteps; ++s) L::load(x + s * L::kVectors, from + s * L::kBytes);
    for (int v = 0; v < kVectors; ++v) sum[v] = op.combine(sum[v], op.prepare(x[v]));
  }
  for (int v = 0; v < kVectors; ++v) sum[v] = op.finish(sum[v]);
  for (int s = 0; s < kSteps; ++s) L::store(out + s * L::kBytes, sum + s * L::kVectors);
}

template <class L, class Op>
PHX_ALWAYS_INLINE void reduce_all(char *out, const void *const *in, int n, size_t count, const Op &op) {
  constexpr size_t kStep = L::kBytes;
  constexpr int kUnroll = 4 / L::kVectors;
  const size_t bytes = count * L::kElement;
  alignas(64) char last[kStep];
  if (bytes < kStep) {
    if (bytes == 0) return;
    reduce_steps<L, 1>(last, Padded<L::kBytes>{in, bytes, {}}, n, op);
    std::memcpy(out, last, bytes);
    return;
  }
  // The last step may overlap the one before it. It is computed first, while `out` still holds its input.
  const size_t last_at = bytes - kStep;
  reduce_steps<L, 1>(last, InPlace{in, last_at}, n, op);
  size_t at = 0;
  for (; at + kUnroll * kStep <= bytes; at += kUnroll * kStep)
    reduce_steps<L, kUnroll>(out + at, InPlace{in, at}, n, op);
  for (; at < last_at; at += kStep) reduce_steps<L, 1>(out + at, InPlace{in, at}, n, op);
  std::memcpy(out + last_at, last, kStep);
}

template <class L, class Op>
PHX_ALWAYS_INLINE void reduce(void *out, const void *const *in, int n, size_t count, const Op &op) {
  // Two inputs are what pairs and exchanges have; knowing it lets the compiler drop the loop over inputs.
  if (n == 2) {
    const void *const two[2] = {in[0], in[1]};
    reduce_all<L>(static_cast<char *>(out), two, 2, count, op);
  } else {
    reduce_all<L>(static_cast<char *>(out), in, n, count, op);
  }
}

template <class T>
constexpr bool kIsFloat = static_cast<T>(0.5) != 0;
template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <class Isa>
struct VectorKernels {
  template <class E, class Op>
  static void run(void *out, const void *const *in, int n, size_t count, int64_t divisor, double scale) {
    using L = Lanes<Isa, E>;
    using T = typename L::Acc;
    if constexpr (kSame<Op, Average> && kIsFloat<T>) {
      if ((divisor & (divisor - 1)) == 0) {
        reduce<L>(out, in, n, count, SumHalved<Isa, T>(divisor, scale));
      } else {
        reduce<L>(out, in, n, count, SumDivided<Isa, T>(divisor, scale));
      }
    } else {
      reduce<L>(out, in, n, count, Combine<Isa, T, Op>(divisor, scale));
    }
  }
};

}  // namespace
}  // namespace phx::kernels
