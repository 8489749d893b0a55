// Selects the kernel for a pair of dtype and op, in the same way for every instruction set.
//
// Everything here, and in vector_kernel.h, is in an unnamed namespace although it is a header: each file that includes
// it is compiled for another instruction set, and the linker must never give one file a function compiled for another.
// For the same reason those files use no functions of the standard library that are templates or inline. Its type
// traits have no code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/kernels.h"

namespace phx::kernels {

// In scalar.cpp and reduce_*.cpp. The caller must make sure that the host can execute the kernels.
ReduceFn find_scalar(int32_t dtype, int32_t op, Results results);
ReduceFn find_avx2(int32_t dtype, int32_t op, Results results);
ReduceFn find_avx512(int32_t dtype, int32_t op, Results results);
ReduceFn find_neon(int32_t dtype, int32_t op, Results results);

namespace {

// Tags for elements for which C++17 has no type, or, for bool, no type with the arithmetic that reductions need. Other
// elements are their own types.
struct F16 {};
struct BF16 {};
struct F8E4M3 {};
struct F8E5M2 {};
struct Bool {};
template <class T>
struct Complex {
  T re, im;
};
template <class E>
constexpr bool kIsComplex = false;
template <class T>
constexpr bool kIsComplex<Complex<T>> = true;

// Tags for what ops do to an element. bool needs no tags of its own: for 0 and 1, `or`, `and` and `xor` do everything.
struct Sum {};
struct Average {};
struct Product {};
struct Minimum {};
struct Maximum {};
struct BitAnd {};
struct BitOr {};
struct BitXor {};
struct PremulSum {};

template <size_t kBytes>
using UnsignedOf =
    std::conditional_t<kBytes == 1, uint8_t,
                       std::conditional_t<kBytes == 2, uint16_t, std::conditional_t<kBytes == 4, uint32_t, uint64_t>>>;
template <class T>
using Unsigned = UnsignedOf<sizeof(T)>;

// `Kernels` is a family: Kernels::run<Element, Op> is a ReduceFn.
template <class Kernels, class E>
ReduceFn floating(int32_t op) {
  switch (op) {
    case PHX_OP_SUM: return &Kernels::template run<E, Sum>;
    case PHX_OP_AVG: return &Kernels::template run<E, Average>;
    case PHX_OP_PROD: return &Kernels::template run<E, Product>;
    case PHX_OP_MIN: return &Kernels::template run<E, Minimum>;
    case PHX_OP_MAX: return &Kernels::template run<E, Maximum>;
    case PHX_OP_PREMUL_SUM: return &Kernels::template run<E, PremulSum>;
    default: return nullptr;
  }
}

// All ops but the product do the same to both components, so they run on twice as many real numbers.
template <class Kernels, class T, class Op>
void on_components(void *out, const void *const *in, int n, size_t count, int64_t divisor, double scale) {
  Kernels::template run<T, Op>(out, in, n, 2 * count, divisor, scale);
}
template <class Kernels, class T>
ReduceFn complex(int32_t op) {
  switch (op) {
    case PHX_OP_SUM: return &on_components<Kernels, T, Sum>;
    case PHX_OP_AVG: return &on_components<Kernels, T, Average>;
    case PHX_OP_PROD: return &Kernels::template run<Complex<T>, Product>;
    case PHX_OP_PREMUL_SUM: return &on_components<Kernels, T, PremulSum>;
    default: return nullptr;
  }
}

// Signed and unsigned integers share the unsigned kernel if the results are the same bits in two's complement, because
// unsigned integers may wrap around.
template <class Kernels, class T>
ReduceFn integer(int32_t op) {
  using U = Unsigned<T>;
  switch (op) {
    case PHX_OP_SUM: return &Kernels::template run<U, Sum>;
    case PHX_OP_AVG: return &Kernels::template run<T, Average>;
    case PHX_OP_PROD: return &Kernels::template run<U, Product>;
    case PHX_OP_MIN: return &Kernels::template run<T, Minimum>;
    case PHX_OP_MAX: return &Kernels::template run<T, Maximum>;
    case PHX_OP_BAND: return &Kernels::template run<U, BitAnd>;
    case PHX_OP_BOR: return &Kernels::template run<U, BitOr>;
    case PHX_OP_BXOR: return &Kernels::template run<U, BitXor>;
    default: return nullptr;
  }
}

template <class Kernels>
ReduceFn boolean(int32_t op) {
  switch (op) {
    case PHX_OP_SUM:
    case PHX_OP_MAX:
    case PHX_OP_BOR: return &Kernels::template run<Bool, BitOr>;
    case PHX_OP_PROD:
    case PHX_OP_MIN:
    case PHX_OP_BAND: return &Kernels::template run<Bool, BitAnd>;
    case PHX_OP_BXOR: return &Kernels::template run<Bool, BitXor>;
    default: return nullptr;
  }
}

template <class Kernels>
ReduceFn select(int32_t dtype, int32_t op) {
  switch (dtype) {
    case PHX_DTYPE_F16: return floating<Kernels, F16>(op);
    case PHX_DTYPE_BF16: return floating<Kernels, BF16>(op);
    case PHX_DTYPE_F32: return floating<Kernels, float>(op);
    case PHX_DTYPE_F64: return floating<Kernels, double>(op);
    case PHX_DTYPE_I8: return integer<Kernels, int8_t>(op);
    case PHX_DTYPE_U8: return integer<Kernels, uint8_t>(op);
    case PHX_DTYPE_I16: return integer<Kernels, int16_t>(op);
    case PHX_DTYPE_U16: return integer<Kernels, uint16_t>(op);
    case PHX_DTYPE_I32: return integer<Kernels, int32_t>(op);
    case PHX_DTYPE_U32: return integer<Kernels, uint32_t>(op);
    case PHX_DTYPE_I64: return integer<Kernels, int64_t>(op);
    case PHX_DTYPE_U64: return integer<Kernels, uint64_t>(op);
    case PHX_DTYPE_BOOL: return boolean<Kernels>(op);
    case PHX_DTYPE_C64: return complex<Kernels, float>(op);
    case PHX_DTYPE_C128: return complex<Kernels, double>(op);
    case PHX_DTYPE_F8E4M3: return floating<Kernels, F8E4M3>(op);
    case PHX_DTYPE_F8E5M2: return floating<Kernels, F8E5M2>(op);
    default: return nullptr;
  }
}

}  // namespace
}  // namespace phx::kernels
