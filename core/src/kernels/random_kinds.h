// How each kind turns random words into an element, or into two for normal numbers. Used by kernels of every processor.
#pragma once

#include "kernels/random.h"
#include "kernels/random_elements.h"

namespace phx::random {
namespace {

// Each kind has: Out, the type of an element; Word, the random bits of an element; Constants, the settings in the types
// of the loop; and `element`, or, if kPaired, `real`, which returns two elements before they are stored.

template <class U>
struct Bits {
  using Out = U;
  using Word = U;
  static constexpr bool kPaired = false;
  struct Constants {
    PHX_RANDOM_FN explicit Constants(const Settings &) {}
  };
  static PHX_RANDOM_FN U element(U word, const Constants &) { return word; }
};

// What the kinds of floats have in common.
template <class E>
using RealOf = typename Element<E>::Real;
template <class E>
using WordOf = std::conditional_t<std::is_same_v<E, double>, uint64_t, uint32_t>;
template <class E>
struct FloatConstants {
  RealOf<E> offset, scale, bound;
  PHX_RANDOM_FN explicit FloatConstants(const Settings &s)
      : offset(static_cast<RealOf<E>>(s.offset)),
        scale(static_cast<RealOf<E>>(s.scale)),
        bound(static_cast<RealOf<E>>(s.bound)) {}
};
template <class E, bool kIsPaired>
struct Floating {
  using Out = E;
  using Word = WordOf<E>;
  using Real = RealOf<E>;
  using Constants = FloatConstants<E>;
  static constexpr bool kPaired = kIsPaired;
};

template <class E>
struct Uniform : Floating<E, false> {
  static PHX_RANDOM_FN E element(WordOf<E> word, const FloatConstants<E> &c) {
    const RealOf<E> value = c.offset + c.scale * unit<Element<E>::kBits>(word);
    return Element<E>::store(value < c.bound ? value : c.bound);
  }
};

template <class E>
struct Normal : Floating<E, true> {
  static PHX_RANDOM_FN Pair<RealOf<E>> real(WordOf<E> first, WordOf<E> second, const FloatConstants<E> &c) {
    const Pair<RealOf<E>> z = normals<RealOf<E>>(first, second);
    return {c.offset + c.scale * z.first, c.offset + c.scale * z.second};
  }
};

template <class E>
struct LogNormal : Floating<E, true> {
  static PHX_RANDOM_FN Pair<RealOf<E>> real(WordOf<E> first, WordOf<E> second, const FloatConstants<E> &c) {
    const Pair<RealOf<E>> x = Normal<E>::real(first, second, c);
    return {exponential(x.first), exponential(x.second)};
  }
};

template <class E>
struct Cauchy : Floating<E, false> {
  static PHX_RANDOM_FN E element(WordOf<E> word, const FloatConstants<E> &c) {
    return Element<E>::store(c.offset + c.scale * cauchy<RealOf<E>>(word));
  }
};

template <class E>
struct Exponential : Floating<E, false> {
  static PHX_RANDOM_FN E element(WordOf<E> word, const FloatConstants<E> &c) {
    const RealOf<E> value = c.scale * minus_log(positive(word));
    return Element<E>::store(value > c.bound ? value : c.bound);
  }
};

// Elements of type U with the bits 0 or kOne; `limit` of the 2^32 words give kOne.
template <class U, uint64_t kOne>
struct Bernoulli {
  using Out = U;
  using Word = uint32_t;
  static constexpr bool kPaired = false;
  struct Constants {
    uint32_t last;
    U value;
    PHX_RANDOM_FN explicit Constants(const Settings &s)
        : last(static_cast<uint32_t>(s.limit - 1)), value(s.limit == 0 ? 0 : static_cast<U>(kOne)) {}
  };
  static PHX_RANDOM_FN U element(uint32_t word, const Constants &c) { return word <= c.last ? c.value : U(0); }
};

struct Truth {
  uint8_t byte;
};
// Integers keep their lowest bits.
template <class E>
PHX_RANDOM_FN E stored(int64_t value) {
  if constexpr (std::is_same_v<E, Truth>) {
    return {static_cast<uint8_t>(value != 0)};
  } else if constexpr (std::is_integral_v<E>) {
    return static_cast<E>(value);
  } else {
    return Element<E>::store(static_cast<RealOf<E>>(value));
  }
}

// low + floor(range * word / 2^bits): each value comes from 2^bits / range of the words, give or take one.
template <class E, class W>
struct Integers {
  using Out = E;
  using Word = W;
  static constexpr bool kPaired = false;
  struct Constants {
    uint64_t low, range;
    PHX_RANDOM_FN explicit Constants(const Settings &s) : low(static_cast<uint64_t>(s.low)), range(s.range) {}
  };
  static PHX_RANDOM_FN E element(uint32_t word, const Constants &c) {
    return stored<E>(static_cast<int64_t>(c.low + ((word * c.range) >> 32)));
  }
  static PHX_RANDOM_FN E element(uint64_t word, const Constants &c) {
    return stored<E>(static_cast<int64_t>(c.low + (c.range == 0 ? word : upper_product(word, c.range))));
  }
};

// Family::get<Kind> returns the kernel of a kind. The choice of the kind is the same for every processor.
template <class Family, template <class> class Kind>
typename Family::Fn floating(int32_t dtype) {
  switch (dtype) {
    case PHX_DTYPE_F16: return Family::template get<Kind<F16>>();
    case PHX_DTYPE_BF16: return Family::template get<Kind<BF16>>();
    case PHX_DTYPE_F32: return Family::template get<Kind<float>>();
    case PHX_DTYPE_F64: return Family::template get<Kind<double>>();
    default: return nullptr;
  }
}
template <class Family>
typename Family::Fn bits(int32_t dtype) {
  switch (dtype) {
    case PHX_DTYPE_I32:
    case PHX_DTYPE_U32: return Family::template get<Bits<uint32_t>>();
    case PHX_DTYPE_I64:
    case PHX_DTYPE_U64: return Family::template get<Bits<uint64_t>>();
    default: return nullptr;
  }
}
template <class Family>
typename Family::Fn bernoulli(int32_t dtype) {
  switch (dtype) {
    case PHX_DTYPE_BOOL:
    case PHX_DTYPE_I8:
    case PHX_DTYPE_U8: return Family::template get<Bernoulli<uint8_t, 1>>();
    case PHX_DTYPE_I16:
    case PHX_DTYPE_U16: return Family::template get<Bernoulli<uint16_t, 1>>();
    case PHX_DTYPE_I32:
    case PHX_DTYPE_U32: return Family::template get<Bernoulli<uint32_t, 1>>();
    case PHX_DTYPE_I64:
    case PHX_DTYPE_U64: return Family::template get<Bernoulli<uint64_t, 1>>();
    case PHX_DTYPE_F16: return Family::template get<Bernoulli<uint16_t, 0x3c00>>();
    case PHX_DTYPE_BF16: return Family::template get<Bernoulli<uint16_t, 0x3f80>>();
    case PHX_DTYPE_F32: return Family::template get<Bernoulli<uint32_t, 0x3f800000>>();
    case PHX_DTYPE_F64: return Family::template get<Bernoulli<uint64_t, 0x3ff0000000000000>>();
    default: return nullptr;
  }
}
template <class Family, class Word>
typename Family::Fn integers(int32_t dtype) {
  switch (dtype) {
    case PHX_DTYPE_BOOL: return Family::template get<Integers<Truth, Word>>();
    case PHX_DTYPE_I8:
    case PHX_DTYPE_U8: return Family::template get<Integers<uint8_t, Word>>();
    case PHX_DTYPE_I16:
    case PHX_DTYPE_U16: return Family::template get<Integers<uint16_t, Word>>();
    case PHX_DTYPE_I32:
    case PHX_DTYPE_U32: return Family::template get<Integers<uint32_t, Word>>();
    case PHX_DTYPE_I64:
    case PHX_DTYPE_U64: return Family::template get<Integers<uint64_t, Word>>();
    case PHX_DTYPE_F16: return Family::template get<Integers<F16, Word>>();
    case PHX_DTYPE_BF16: return Family::template get<Integers<BF16, Word>>();
    case PHX_DTYPE_F32: return Family::template get<Integers<float, Word>>();
    case PHX_DTYPE_F64: return Family::template get<Integers<double, Word>>();
    default: return nullptr;
  }
}
template <class Family>
typename Family::Fn select(int32_t kind, int32_t dtype) {
  switch (kind) {
    case PHX_RANDOM_BITS: return bits<Family>(dtype);
    case PHX_RANDOM_UNIFORM: return floating<Family, Uniform>(dtype);
    case PHX_RANDOM_NORMAL: return floating<Family, Normal>(dtype);
    case PHX_RANDOM_EXPONENTIAL: return floating<Family, Exponential>(dtype);
    case PHX_RANDOM_BERNOULLI: return bernoulli<Family>(dtype);
    case PHX_RANDOM_CAUCHY: return floating<Family, Cauchy>(dtype);
    case PHX_RANDOM_LOG_NORMAL: return floating<Family, LogNormal>(dtype);
    case kNarrowIntegers: return integers<Family, uint32_t>(dtype);
    case kWideIntegers: return integers<Family, uint64_t>(dtype);
    default: return nullptr;
  }
}

}  // namespace
}  // namespace phx::random
