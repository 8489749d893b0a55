// A naive reference for the reduction kernels, and calls that compare with it.
//
// The reference shares nothing with the kernels: it decodes and encodes the narrow floats by arithmetic on powers of
// two instead of on bits, and does integers modulo 2^64 before cutting them off.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "base/sanitizers.h"
#include "check.h"
#include "kernels/kernels.h"

namespace kernel_test {

using phx::kernels::find_reduce_isa;
using phx::kernels::ReduceFn;
using phx::kernels::Results;
using Bytes = std::vector<unsigned char>;

constexpr const char *kIsas[] = {"scalar", "avx2", "avx512", "neon"};
constexpr double kScale = 0.3;

inline bool is_f8(int32_t dtype) { return dtype == PHX_DTYPE_F8E4M3 || dtype == PHX_DTYPE_F8E5M2; }
inline bool is_float(int32_t dtype) { return dtype <= PHX_DTYPE_F64 || is_f8(dtype); }
inline bool is_complex(int32_t dtype) { return dtype == PHX_DTYPE_C64 || dtype == PHX_DTYPE_C128; }
inline bool is_signed(int32_t dtype) {
  return dtype == PHX_DTYPE_I8 || dtype == PHX_DTYPE_I16 || dtype == PHX_DTYPE_I32 || dtype == PHX_DTYPE_I64;
}
inline bool is_defined(int32_t dtype, int32_t op) {
  const bool bitwise = op == PHX_OP_BAND || op == PHX_OP_BOR || op == PHX_OP_BXOR;
  if (is_float(dtype)) return !bitwise;
  if (is_complex(dtype)) return !bitwise && op != PHX_OP_MIN && op != PHX_OP_MAX;
  if (dtype == PHX_DTYPE_BOOL) return op != PHX_OP_AVG && op != PHX_OP_PREMUL_SUM;
  return op != PHX_OP_PREMUL_SUM;
}
inline bool available(const char *isa) { return find_reduce_isa(isa, PHX_DTYPE_F32, PHX_OP_SUM) != nullptr; }

// ---- the reference ----------------------------------------------------------------------------------------------

// A binary float of `exponent` and `fraction` bits below the sign. Without infinities, the largest exponent is one of
// numbers, except that all ones are NaN.
struct Format {
  int exponent, fraction;
  bool infinities;
  int nan;
  int bias() const { return (1 << (exponent - 1)) - 1; }
  int sign() const { return 1 << (exponent + fraction); }
  // The code after the largest number's: infinity, or NaN where there is none; then what is too large becomes that
  // number.
  int above() const { return infinities ? ((1 << exponent) - 1) << fraction : sign() - 1; }
};
inline Format format_of(int32_t dtype) {
  if (dtype == PHX_DTYPE_F16) return {5, 10, true, 0x7e00};
  if (dtype == PHX_DTYPE_BF16) return {8, 7, true, 0x7fc0};
  if (dtype == PHX_DTYPE_F8E4M3) return {4, 3, false, 0x7f};
  return {5, 2, true, 0x7f};
}

inline double decode(Format f, int bits) {
  const int magnitude = bits & (f.sign() - 1), exponent = magnitude >> f.fraction;
  const int fraction = magnitude & ((1 << f.fraction) - 1);
  const double sign = (bits & f.sign()) != 0 ? -1 : 1;
  if (f.infinities && magnitude == f.above()) return sign * std::numeric_limits<double>::infinity();
  if (magnitude >= f.above()) return std::nan("");
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - f.bias() - f.fraction);
  return sign * std::ldexp(fraction + (1 << f.fraction), exponent - f.bias() - f.fraction);
}

inline int encode(Format f, float value) {
  if (std::isnan(value)) return f.nan;
  const int sign = std::signbit(value) ? f.sign() : 0, above = sign | (f.infinities ? f.above() : f.above() - 1);
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isinf(magnitude)) return above;
  int power = 1 - f.bias();
  if (magnitude != 0 && std::ilogb(magnitude) > power) power = std::ilogb(magnitude);
  // To nearest even, and exact until here.
  const double units = std::nearbyint(std::ldexp(magnitude, f.fraction - power));
  // Where units is one more than fits, and where it is one bit less (subnormals), the sum carries into the exponent.
  const int bits = static_cast<int>(units) + ((power + f.bias() - 1) << f.fraction);
  return bits < f.above() ? sign | bits : above;
}

template <class T>
T minimum(T a, T b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
template <class T>
T maximum(T a, T b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
  if (a == b) return std::signbit(a) ? b : a;
  return a < b ? b : a;
}

template <class T>
T reduce_floats(const std::vector<T> &x, int32_t op, int64_t divisor, double scale) {
  T sum = op == PHX_OP_PREMUL_SUM ? x[0] * static_cast<T>(scale) : x[0];
  for (size_t k = 1; k < x.size(); ++k) {
    if (op == PHX_OP_SUM || op == PHX_OP_AVG) sum = sum + x[k];
    if (op == PHX_OP_PROD) sum = sum * x[k];
    if (op == PHX_OP_MIN) sum = minimum(sum, x[k]);
    if (op == PHX_OP_MAX) sum = maximum(sum, x[k]);
    if (op == PHX_OP_PREMUL_SUM) {
      const T scaled = x[k] * static_cast<T>(scale);
      sum = sum + scaled;
    }
  }
  if (op == PHX_OP_AVG) sum = sum / static_cast<T>(divisor);
  return std::isnan(sum) ? std::numeric_limits<T>::quiet_NaN() : sum;
}

template <class T>
T at(const Bytes &bytes, size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
  return value;
}
template <class T>
inline void put(Bytes &bytes, size_t i, T value) {
  std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
}

// The plain formula: the compiler is told (-ffp-contract=off) to fuse nothing.
template <class T>
inline void reduce_complex(Bytes &out, const std::vector<Bytes> &in, size_t i, int32_t op, int64_t divisor,
                           double scale) {
  std::vector<T> re, im;
  for (const Bytes &input : in) {
    re.push_back(at<T>(input, 2 * i));
    im.push_back(at<T>(input, 2 * i + 1));
  }
  T parts[2] = {re[0], im[0]};
  for (size_t k = 1; k < in.size(); ++k) {
    const T ac = parts[0] * re[k], bd = parts[1] * im[k], ad = parts[0] * im[k], bc = parts[1] * re[k];
    parts[0] = ac - bd;
    parts[1] = ad + bc;
  }
  if (op != PHX_OP_PROD) {
    parts[0] = reduce_floats(re, op, divisor, scale);
    parts[1] = reduce_floats(im, op, divisor, scale);
  }
  for (size_t p = 0; p < 2; ++p)
    put(out, 2 * i + p, std::isnan(parts[p]) ? std::numeric_limits<T>::quiet_NaN() : parts[p]);
}

// A narrow float by the number of its bytes.
inline int narrow_at(const Bytes &bytes, size_t i, int32_t dtype) {
  return is_f8(dtype) ? at<uint8_t>(bytes, i) : at<uint16_t>(bytes, i);
}
inline void put_narrow(Bytes &bytes, size_t i, int32_t dtype, int value) {
  if (is_f8(dtype))
    put(bytes, i, static_cast<uint8_t>(value));
  else
    put(bytes, i, static_cast<uint16_t>(value));
}

inline uint64_t integer_at(const Bytes &bytes, size_t i, int32_t dtype) {  // sign-extended
  const size_t size = phx_dtype_size(dtype);
  uint64_t value = 0;
  for (size_t b = 0; b < size; ++b) value |= static_cast<uint64_t>(bytes[i * size + b]) << 8 * b;
  const bool negative = is_signed(dtype) && (value >> (8 * size - 1) & 1) != 0;
  return negative && size < 8 ? value | ~uint64_t{0} << 8 * size : value;
}

inline uint64_t reduce_integers(const std::vector<uint64_t> &x, int32_t dtype, int32_t op, int64_t divisor) {
  const int unused = 64 - 8 * static_cast<int>(phx_dtype_size(dtype));
  auto less = [&](uint64_t a, uint64_t b) {
    return is_signed(dtype) ? static_cast<int64_t>(a) < static_cast<int64_t>(b) : a < b;
  };
  uint64_t sum = x[0];
  for (size_t k = 1; k < x.size(); ++k) {
    if (op == PHX_OP_SUM || op == PHX_OP_AVG) sum += x[k];
    if (op == PHX_OP_PROD) sum *= x[k];
    if (op == PHX_OP_MIN) sum = less(x[k], sum) ? x[k] : sum;
    if (op == PHX_OP_MAX) sum = less(sum, x[k]) ? x[k] : sum;
    if (op == PHX_OP_BAND) sum &= x[k];
    if (op == PHX_OP_BOR) sum |= x[k];
    if (op == PHX_OP_BXOR) sum ^= x[k];
  }
  if (op != PHX_OP_AVG) return sum;
  sum <<= unused;
  if (is_signed(dtype)) return static_cast<uint64_t>((static_cast<int64_t>(sum) >> unused) / divisor);
  return (sum >> unused) / static_cast<uint64_t>(divisor);
}

inline uint64_t reduce_bools(const std::vector<uint64_t> &x, int32_t op) {
  size_t trues = 0;
  for (uint64_t value : x) trues += value != 0 ? 1 : 0;
  if (op == PHX_OP_SUM || op == PHX_OP_MAX || op == PHX_OP_BOR) return trues != 0;
  if (op == PHX_OP_BXOR) return trues % 2;
  return trues == x.size();
}

inline Bytes reference(const std::vector<Bytes> &in, size_t count, int32_t dtype, int32_t op, int64_t divisor,
                       double scale) {
  const size_t size = phx_dtype_size(dtype);
  Bytes out(count * size);
  std::vector<double> doubles(in.size());
  std::vector<float> floats(in.size());
  std::vector<uint64_t> integers(in.size());
  const Format format = format_of(dtype);
  for (size_t i = 0; i < count; ++i) {
    if (dtype == PHX_DTYPE_C64) {
      reduce_complex<float>(out, in, i, op, divisor, scale);
    } else if (dtype == PHX_DTYPE_C128) {
      reduce_complex<double>(out, in, i, op, divisor, scale);
    } else if (dtype == PHX_DTYPE_F64) {
      for (size_t k = 0; k < in.size(); ++k) doubles[k] = at<double>(in[k], i);
      put(out, i, reduce_floats(doubles, op, divisor, scale));
    } else if (dtype == PHX_DTYPE_F32) {
      for (size_t k = 0; k < in.size(); ++k) floats[k] = at<float>(in[k], i);
      put(out, i, reduce_floats(floats, op, divisor, scale));
    } else if (is_float(dtype)) {
      for (size_t k = 0; k < in.size(); ++k) floats[k] = static_cast<float>(decode(format, narrow_at(in[k], i, dtype)));
      put_narrow(out, i, dtype, encode(format, reduce_floats(floats, op, divisor, scale)));
    } else {
      for (size_t k = 0; k < in.size(); ++k) integers[k] = integer_at(in[k], i, dtype);
      const uint64_t sum =
          dtype == PHX_DTYPE_BOOL ? reduce_bools(integers, op) : reduce_integers(integers, dtype, op, divisor);
      for (size_t b = 0; b < size; ++b) out[i * size + b] = static_cast<unsigned char>(sum >> 8 * b);
    }
  }
  return out;
}

// ---- inputs and calls -------------------------------------------------------------------------------------------

// Half of them any bits at all (infinities, NaNs and subnormals among them), half of them numbers near 1 or small
// integers.
inline Bytes random_elements(std::mt19937_64 &random, int32_t dtype, size_t count) {
  const size_t size = phx_dtype_size(dtype);
  Bytes bytes(count * size);
  for (unsigned char &byte : bytes) byte = static_cast<unsigned char>(random());
  for (size_t i = 0; i < count; ++i) {
    if (random() % 2 == 0) continue;
    const double value = static_cast<double>(static_cast<int64_t>(random() % 4001) - 2000) / 512;
    const bool narrow = dtype == PHX_DTYPE_F16 || dtype == PHX_DTYPE_BF16 || is_f8(dtype);
    if (narrow) put_narrow(bytes, i, dtype, encode(format_of(dtype), static_cast<float>(value)));
    if (dtype == PHX_DTYPE_F32) put(bytes, i, static_cast<float>(value));
    if (dtype == PHX_DTYPE_F64) put(bytes, i, value);
    for (size_t part = 0; part < 2; ++part) {
      if (dtype == PHX_DTYPE_C64)
        put(bytes, 2 * i + part, static_cast<float>(value / (1.0 + static_cast<double>(part))));
      if (dtype == PHX_DTYPE_C128) put(bytes, 2 * i + part, value / (1.0 + static_cast<double>(part)));
    }
    if (!is_float(dtype) && !is_complex(dtype)) {
      const uint64_t small = dtype == PHX_DTYPE_BOOL ? random() % 2 : random() % 7 - (is_signed(dtype) ? 3 : 0);
      for (size_t b = 0; b < size; ++b) bytes[i * size + b] = static_cast<unsigned char>(small >> 8 * b);
    }
  }
  return bytes;
}

// Inputs and, behind them, room for an output, `shift` bytes off alignment, each a little differently, with something
// around them that nobody may write over.
class Placed {
 public:
  Placed(const std::vector<Bytes> &in, size_t bytes, size_t shift) : bytes_(bytes) {
    for (size_t k = 0; k <= in.size(); ++k) {
      const size_t offset = kGuard + (shift * (k + 1)) % 64;
      places_.emplace_back(offset + bytes + kGuard, static_cast<unsigned char>(0xa5));
      if (k < in.size() && bytes != 0) std::memcpy(places_[k].data() + offset, in[k].data(), bytes);
      pointers_.push_back(places_[k].data() + offset);
    }
  }
  const void *const *pointers() { return pointers_.data(); }
  void *out(size_t place) {
    return places_[place].data() + (static_cast<const unsigned char *>(pointers_[place]) - places_[place].data());
  }
  Bytes content(size_t place) {
    const Bytes &all = places_[place];
    const unsigned char *const begin = static_cast<unsigned char *>(out(place)), *const end = begin + bytes_;
    for (const unsigned char *p = all.data(); p != begin; ++p) CHECK(*p == 0xa5);
    for (const unsigned char *p = end; p != all.data() + all.size(); ++p) CHECK(*p == 0xa5);
    return Bytes(begin, end);
  }

 private:
  static constexpr size_t kGuard = 64;
  size_t bytes_;
  std::vector<Bytes> places_;
  std::vector<const void *> pointers_;
};

// alias: the input that the output shall be; -1 for none.
inline Bytes call(ReduceFn fn, const std::vector<Bytes> &in, size_t bytes, size_t count, int64_t divisor, double scale,
                  size_t shift, int alias) {
  Placed placed(in, bytes, shift);
  const size_t target = alias < 0 ? in.size() : static_cast<size_t>(alias);
  fn(placed.out(target), placed.pointers(), static_cast<int>(in.size()), count, divisor, scale);
  return placed.content(target);
}

inline void expect(const Bytes &got, const Bytes &wanted, const char *isa, int32_t dtype, int32_t op, size_t n,
                   const char *what) {
  if (got == wanted) return;
  size_t i = 0;
  while (got[i] == wanted[i]) ++i;
  const size_t element = i / phx_dtype_size(dtype);
  char text[256];
  std::snprintf(text, sizeof text, "%s %s %s of %zu inputs, %s: element %zu of %zu is wrong", isa,
                phx_dtype_name(dtype), phx_op_name(op), n, what, element, got.size() / phx_dtype_size(dtype));
  check::failed(__FILE__, __LINE__, text);
}

// Into all inputs, through one instruction set.
inline void expect_into_all(const std::vector<Bytes> &in, const Bytes &wanted, const char *isa, size_t count,
                            int32_t dtype, int32_t op, int64_t divisor, double scale, size_t shift) {
  Placed placed(in, wanted.size(), shift);
  const ReduceFn fn = find_reduce_isa(isa, dtype, op, Results::kIntoAll);
  fn(nullptr, placed.pointers(), static_cast<int>(in.size()), count, divisor, scale);
  for (size_t k = 0; k < in.size(); ++k) {
    char what[80];
    std::snprintf(what, sizeof what, "into all, shifted by %zu, input %zu, divisor %lld", shift, k,
                  static_cast<long long>(divisor));
    expect(placed.content(k), wanted, isa, dtype, op, in.size(), what);
  }
}

// The same inputs through every instruction set: with plain and with streaming stores, and into all of them.
inline void expect_all(const std::vector<Bytes> &in, size_t count, int32_t dtype, int32_t op, int64_t divisor,
                       double scale, size_t shift = 0, int alias = -1) {
  const Bytes wanted = reference(in, count, dtype, op, divisor, scale);
  for (const char *isa : kIsas) {
    if (!available(isa)) continue;
    for (bool streaming : {false, true}) {
      const ReduceFn fn = find_reduce_isa(isa, dtype, op, streaming ? Results::kStreamed : Results::kStored);
      char what[80];
      std::snprintf(what, sizeof what, "%s, shifted by %zu, output %d, divisor %lld", streaming ? "streaming" : "plain",
                    shift, alias, static_cast<long long>(divisor));
      expect(call(fn, in, wanted.size(), count, divisor, scale, shift, alias), wanted, isa, dtype, op, in.size(), what);
    }
    if (alias < 0) expect_into_all(in, wanted, isa, count, dtype, op, divisor, scale, shift);
  }
}

template <class Body>
inline void for_each_pair(Body &&body) {
  for (int32_t dtype = PHX_DTYPE_F16; dtype <= PHX_DTYPE_F8E5M2; ++dtype)
    for (int32_t op = PHX_OP_SUM; op <= PHX_OP_PREMUL_SUM; ++op)
      if (is_defined(dtype, op)) body(dtype, op);
}
// The same, of every fifth pair where a sanitizer looks: kernels of GPUs differ in their arithmetic alone.
template <class Body>
void for_pairs_of_gpus(Body &&body) {
#ifdef PHX_SANITIZED
  constexpr int kOneIn = 5;
#else
  constexpr int kOneIn = 1;
#endif
  int number = 0;
  for_each_pair([&](int32_t dtype, int32_t op) {
    if (number++ % kOneIn == 0) body(dtype, op);
  });
}

}  // namespace kernel_test
