// The reduction kernels against a naive reference, for every dtype, op and instruction set of this host.
//
// The reference shares nothing with the kernels: it decodes and encodes f16 and bf16 by arithmetic on powers of two
// instead of on bits, and does integers modulo 2^64 before cutting them off.
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "check.h"
#include "kernels/kernels.h"

namespace {

using phx::kernels::find_reduce_isa;
using phx::kernels::ReduceFn;
using Bytes = std::vector<unsigned char>;

constexpr const char *kIsas[] = {"scalar", "avx2", "avx512"};
constexpr size_t kCounts[] = {0, 1, 3, 17, 63, 64, 65, 255, 256, 257, 1000, 4099};
constexpr int kInputs[] = {1, 2, 3, 4, 5, 8, 17};
constexpr double kScale = 0.3;

bool is_float(int32_t dtype) { return dtype <= PHX_F64; }
bool is_signed(int32_t dtype) { return dtype == PHX_I8 || dtype == PHX_I16 || dtype == PHX_I32 || dtype == PHX_I64; }
bool is_defined(int32_t dtype, int32_t op) {
  const bool bitwise = op == PHX_BAND || op == PHX_BOR || op == PHX_BXOR;
  if (is_float(dtype)) return !bitwise;
  if (dtype == PHX_BOOL) return op != PHX_AVG && op != PHX_PREMUL_SUM;
  return op != PHX_PREMUL_SUM;
}
bool available(const char *isa) { return find_reduce_isa(isa, PHX_F32, PHX_SUM) != nullptr; }

// ---- the reference ----------------------------------------------------------------------------------------------

// A binary float of `exponent` and `fraction` bits below the sign.
struct Format {
  int exponent, fraction;
  int bias() const { return (1 << (exponent - 1)) - 1; }
};
constexpr Format kF16{5, 10}, kBF16{8, 7};

double decode(Format f, uint16_t bits) {
  const int exponent = bits >> f.fraction & ((1 << f.exponent) - 1), fraction = bits & ((1 << f.fraction) - 1);
  const double sign = bits >> 15 != 0 ? -1 : 1;
  if (exponent == (1 << f.exponent) - 1)
    return fraction != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - f.bias() - f.fraction);
  return sign * std::ldexp(fraction + (1 << f.fraction), exponent - f.bias() - f.fraction);
}

uint16_t encode(Format f, float value) {
  const int infinite = ((1 << f.exponent) - 1) << f.fraction;
  if (std::isnan(value)) return static_cast<uint16_t>(infinite | 1 << (f.fraction - 1));
  const int sign = std::signbit(value) ? 1 << 15 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isinf(magnitude)) return static_cast<uint16_t>(sign | infinite);
  int power = 1 - f.bias();
  if (magnitude != 0 && std::ilogb(magnitude) > power) power = std::ilogb(magnitude);
  const double units =
      std::nearbyint(std::ldexp(magnitude, f.fraction - power));  // to nearest even, and exact until here
  // Where units is one more than fits, and where it is one bit less (subnormals), the sum carries into the exponent.
  const int bits = static_cast<int>(units) + ((power + f.bias() - 1) << f.fraction);
  return static_cast<uint16_t>(sign | (bits < infinite ? bits : infinite));
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
  T sum = op == PHX_PREMUL_SUM ? x[0] * static_cast<T>(scale) : x[0];
  for (size_t k = 1; k < x.size(); ++k) {
    if (op == PHX_SUM || op == PHX_AVG) sum = sum + x[k];
    if (op == PHX_PROD) sum = sum * x[k];
    if (op == PHX_MIN) sum = minimum(sum, x[k]);
    if (op == PHX_MAX) sum = maximum(sum, x[k]);
    if (op == PHX_PREMUL_SUM) {
      const T scaled = x[k] * static_cast<T>(scale);
      sum = sum + scaled;
    }
  }
  if (op == PHX_AVG) sum = sum / static_cast<T>(divisor);
  return std::isnan(sum) ? std::numeric_limits<T>::quiet_NaN() : sum;
}

template <class T>
T at(const Bytes &bytes, size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
  return value;
}
template <class T>
void put(Bytes &bytes, size_t i, T value) {
  std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
}

uint64_t integer_at(const Bytes &bytes, size_t i, int32_t dtype) {  // sign-extended
  const size_t size = phx_dtype_size(dtype);
  uint64_t value = 0;
  for (size_t b = 0; b < size; ++b) value |= static_cast<uint64_t>(bytes[i * size + b]) << 8 * b;
  const bool negative = is_signed(dtype) && (value >> (8 * size - 1) & 1) != 0;
  return negative && size < 8 ? value | ~uint64_t{0} << 8 * size : value;
}

uint64_t reduce_integers(const std::vector<uint64_t> &x, int32_t dtype, int32_t op, int64_t divisor) {
  const int unused = 64 - 8 * static_cast<int>(phx_dtype_size(dtype));
  auto less = [&](uint64_t a, uint64_t b) {
    return is_signed(dtype) ? static_cast<int64_t>(a) < static_cast<int64_t>(b) : a < b;
  };
  uint64_t sum = x[0];
  for (size_t k = 1; k < x.size(); ++k) {
    if (op == PHX_SUM || op == PHX_AVG) sum += x[k];
    if (op == PHX_PROD) sum *= x[k];
    if (op == PHX_MIN) sum = less(x[k], sum) ? x[k] : sum;
    if (op == PHX_MAX) sum = less(sum, x[k]) ? x[k] : sum;
    if (op == PHX_BAND) sum &= x[k];
    if (op == PHX_BOR) sum |= x[k];
    if (op == PHX_BXOR) sum ^= x[k];
  }
  if (op != PHX_AVG) return sum;
  sum <<= unused;
  if (is_signed(dtype)) return static_cast<uint64_t>((static_cast<int64_t>(sum) >> unused) / divisor);
  return (sum >> unused) / static_cast<uint64_t>(divisor);
}

uint64_t reduce_bools(const std::vector<uint64_t> &x, int32_t op) {
  size_t trues = 0;
  for (uint64_t value : x) trues += value != 0 ? 1 : 0;
  if (op == PHX_SUM || op == PHX_MAX || op == PHX_BOR) return trues != 0;
  if (op == PHX_BXOR) return trues % 2;
  return trues == x.size();
}

Bytes reference(const std::vector<Bytes> &in, size_t count, int32_t dtype, int32_t op, int64_t divisor, double scale) {
  const size_t size = phx_dtype_size(dtype);
  Bytes out(count * size);
  for (size_t i = 0; i < count; ++i) {
    if (dtype == PHX_F64) {
      std::vector<double> x;
      for (const Bytes &input : in) x.push_back(at<double>(input, i));
      put(out, i, reduce_floats(x, op, divisor, scale));
    } else if (dtype == PHX_F32) {
      std::vector<float> x;
      for (const Bytes &input : in) x.push_back(at<float>(input, i));
      put(out, i, reduce_floats(x, op, divisor, scale));
    } else if (is_float(dtype)) {
      const Format format = dtype == PHX_F16 ? kF16 : kBF16;
      std::vector<float> x;
      for (const Bytes &input : in) x.push_back(static_cast<float>(decode(format, at<uint16_t>(input, i))));
      put(out, i, encode(format, reduce_floats(x, op, divisor, scale)));
    } else {
      std::vector<uint64_t> x;
      for (const Bytes &input : in) x.push_back(integer_at(input, i, dtype));
      const uint64_t sum = dtype == PHX_BOOL ? reduce_bools(x, op) : reduce_integers(x, dtype, op, divisor);
      for (size_t b = 0; b < size; ++b) out[i * size + b] = static_cast<unsigned char>(sum >> 8 * b);
    }
  }
  return out;
}

// ---- inputs and calls -------------------------------------------------------------------------------------------

// Half of them any bits at all (infinities, NaNs and subnormals among them), half of them numbers near 1 or small
// integers.
Bytes random_elements(std::mt19937_64 &random, int32_t dtype, size_t count) {
  const size_t size = phx_dtype_size(dtype);
  Bytes bytes(count * size);
  for (unsigned char &byte : bytes) byte = static_cast<unsigned char>(random());
  for (size_t i = 0; i < count; ++i) {
    if (random() % 2 == 0) continue;
    const double value = static_cast<double>(static_cast<int64_t>(random() % 4001) - 2000) / 512;
    if (dtype == PHX_F16) put(bytes, i, encode(kF16, static_cast<float>(value)));
    if (dtype == PHX_BF16) put(bytes, i, encode(kBF16, static_cast<float>(value)));
    if (dtype == PHX_F32) put(bytes, i, static_cast<float>(value));
    if (dtype == PHX_F64) put(bytes, i, value);
    if (!is_float(dtype)) {
      const uint64_t small = dtype == PHX_BOOL ? random() % 2 : random() % 7 - (is_signed(dtype) ? 3 : 0);
      for (size_t b = 0; b < size; ++b) bytes[i * size + b] = static_cast<unsigned char>(small >> 8 * b);
    }
  }
  return bytes;
}

// Places inputs and output `shift` bytes off alignment, each a little differently, and checks that nothing around the
// output is written. alias: the input that the output shall be; -1 for none.
Bytes call(ReduceFn fn, const std::vector<Bytes> &in, size_t bytes, size_t count, int64_t divisor, double scale,
           size_t shift, int alias) {
  constexpr size_t kGuard = 64;
  std::vector<Bytes> places;
  std::vector<const void *> pointers;
  for (size_t k = 0; k <= in.size(); ++k) {
    const size_t offset = kGuard + (shift * (k + 1)) % 64;
    places.emplace_back(offset + bytes + kGuard, static_cast<unsigned char>(0xa5));
    if (k < in.size() && bytes != 0) std::memcpy(places[k].data() + offset, in[k].data(), bytes);
    pointers.push_back(places[k].data() + offset);
  }
  const size_t target = alias < 0 ? in.size() : static_cast<size_t>(alias);
  Bytes &place = places[target];
  unsigned char *out = place.data() + (static_cast<const unsigned char *>(pointers[target]) - place.data());
  fn(out, pointers.data(), static_cast<int>(in.size()), count, divisor, scale);
  for (const unsigned char *p = place.data(); p != out; ++p) CHECK(*p == 0xa5);
  for (const unsigned char *p = out + bytes; p != place.data() + place.size(); ++p) CHECK(*p == 0xa5);
  return Bytes(out, out + bytes);
}

void expect(const Bytes &got, const Bytes &wanted, const char *isa, int32_t dtype, int32_t op, size_t n,
            const char *what) {
  if (got == wanted) return;
  size_t i = 0;
  while (got[i] == wanted[i]) ++i;
  const size_t element = i / phx_dtype_size(dtype);
  char text[256];
  std::snprintf(text, sizeof text, "%s %s %s of %zu inputs, %s: element %zu of %zu is wrong", isa,
                phx_dtype_name(dtype), phx_reduce_op_name(op), n, what, element, got.size() / phx_dtype_size(dtype));
  check::failed(__FILE__, __LINE__, text);
}

// The same inputs through every instruction set.
void expect_all(const std::vector<Bytes> &in, size_t count, int32_t dtype, int32_t op, int64_t divisor, double scale,
                size_t shift = 0, int alias = -1) {
  const Bytes wanted = reference(in, count, dtype, op, divisor, scale);
  for (const char *isa : kIsas) {
    if (!available(isa)) continue;
    char what[80];
    std::snprintf(what, sizeof what, "shifted by %zu, output %d, divisor %lld", shift, alias,
                  static_cast<long long>(divisor));
    expect(call(find_reduce_isa(isa, dtype, op), in, wanted.size(), count, divisor, scale, shift, alias), wanted, isa,
           dtype, op, in.size(), what);
  }
}

template <class Body>
void for_each_pair(Body &&body) {
  for (int32_t dtype = PHX_F16; dtype <= PHX_BOOL; ++dtype)
    for (int32_t op = PHX_SUM; op <= PHX_PREMUL_SUM; ++op)
      if (is_defined(dtype, op)) body(dtype, op);
}

// Inputs of one element each, given as bits of f32.
float combine_f32(const char *isa, int32_t op, float a, float b) {
  const void *in[] = {&a, &b};
  float out = 0;
  find_reduce_isa(isa, PHX_F32, op)(&out, in, 2, 1, 2, 1);
  return out;
}

}  // namespace

TEST(every_pair_that_is_defined_has_a_kernel_and_no_other_has) {
  for (int32_t dtype = -1; dtype <= PHX_BOOL + 1; ++dtype)
    for (int32_t op = -1; op <= PHX_PREMUL_SUM + 1; ++op) {
      const bool known = dtype >= PHX_F16 && dtype <= PHX_BOOL && op >= PHX_SUM && op <= PHX_PREMUL_SUM;
      const bool defined = known && is_defined(dtype, op);
      CHECK((phx::kernels::find_reduce(dtype, op) != nullptr) == defined);
      for (const char *isa : kIsas) CHECK((find_reduce_isa(isa, dtype, op) != nullptr) == (defined && available(isa)));
    }
}

TEST(scalar_is_everywhere_and_the_active_instruction_set_is_an_available_one) {
  CHECK(available("scalar"));
  CHECK(!available("no such thing"));
  CHECK(available(phx::kernels::active_isa()));
  CHECK(phx::kernels::find_reduce(PHX_BF16, PHX_SUM) == find_reduce_isa(phx::kernels::active_isa(), PHX_BF16, PHX_SUM));
  for (const char *isa : kIsas)
    std::fprintf(stderr, "    %s: %s\n", isa, available(isa) ? "tested" : "not available, skipped");
}

TEST(results_equal_the_reference_bit_for_bit_for_all_sizes_and_numbers_of_inputs) {
  std::mt19937_64 random(1);
  for_each_pair([&](int32_t dtype, int32_t op) {
    for (int n : kInputs)
      for (size_t count : kCounts) {
        std::vector<Bytes> in;
        for (int k = 0; k < n; ++k) in.push_back(random_elements(random, dtype, count));
        expect_all(in, count, dtype, op, n, kScale);
      }
  });
}

TEST(pointers_may_have_any_alignment) {
  std::mt19937_64 random(2);
  for_each_pair([&](int32_t dtype, int32_t op) {
    for (size_t shift : {1, 2, 3, 4, 7, 8, 16, 31, 33})
      for (size_t count : {5, 64, 300}) {
        std::vector<Bytes> in;
        for (int k = 0; k < 3; ++k) in.push_back(random_elements(random, dtype, count));
        expect_all(in, count, dtype, op, 3, kScale, shift);
      }
  });
}

TEST(the_output_may_be_any_of_the_inputs) {
  std::mt19937_64 random(3);
  for_each_pair([&](int32_t dtype, int32_t op) {
    for (int n : {1, 2, 4})
      for (int alias = 0; alias < n; ++alias)
        for (size_t count : {1, 7, 64, 65, 100, 129, 300, 1000}) {
          std::vector<Bytes> in;
          for (int k = 0; k < n; ++k) in.push_back(random_elements(random, dtype, count));
          expect_all(in, count, dtype, op, n, kScale, 3, alias);
        }
  });
}

TEST(an_input_may_be_given_twice) {
  std::mt19937_64 random(4);
  const Bytes bytes = random_elements(random, PHX_F32, 333);
  const Bytes wanted = reference({bytes, bytes}, 333, PHX_F32, PHX_SUM, 2, 1);
  for (const char *isa : kIsas) {
    if (!available(isa)) continue;
    Bytes out(bytes.size());
    const void *in[] = {bytes.data(), bytes.data()};
    find_reduce_isa(isa, PHX_F32, PHX_SUM)(out.data(), in, 2, 333, 2, 1);
    CHECK(out == wanted);
  }
}

TEST(all_65536_values_of_f16_and_bf16_widen_and_round_as_the_reference_does) {
  for (int32_t dtype : {PHX_F16, PHX_BF16}) {
    const Format format = dtype == PHX_F16 ? kF16 : kBF16;
    Bytes all(65536 * 2);
    for (size_t i = 0; i < 65536; ++i) put(all, i, static_cast<uint16_t>(i));
    // The reference itself: decoding and encoding again is the identity.
    for (size_t i = 0; i < 65536; ++i) {
      const double value = decode(format, static_cast<uint16_t>(i));
      CHECK(std::isnan(value) || encode(format, static_cast<float>(value)) == i);
    }
    expect_all({all}, 65536, dtype, PHX_SUM, 1, 1);
    // Products that are not representable, from far below the smallest to far above the largest number.
    for (double scale : {1.0 / 3, 0.7, 1.5, -2.25, 0x1p-1, 0x1p-3, 0x1.8p-9, 0x1.ffep-14, 0x1p-24, 0x1p-30, 0x1p8,
                         0x1.fp15, 0x1p120, 0x1p-126})
      expect_all({all}, 65536, dtype, PHX_PREMUL_SUM, 1, scale);
    // Sums that lie halfway between two numbers, or just beside.
    for (double other : {0x1p-25, 0x1p-24, 0x1.8p-24, 0x1p-14, 0x1p-11, 0x1.004p-11, 0x1p-8, 0x1p-9, 1.0, 16.0, 65504.0,
                         -65504.0, 0x1p-133, 0x1p127}) {
      Bytes addend(all.size());
      for (size_t i = 0; i < 65536; ++i) put(addend, i, encode(format, static_cast<float>(other)));
      expect_all({all, addend}, 65536, dtype, PHX_SUM, 2, 1);
      expect_all({addend, all}, 65536, dtype, PHX_MIN, 2, 1);
      expect_all({all, addend}, 65536, dtype, PHX_MAX, 2, 1);
    }
  }
}

TEST(f16_and_bf16_round_once_and_not_after_each_input) {
  // 2048 + 1 is 2048 in f16, and 256 + 1 is 256 in bf16; adding four ones at once must not lose them.
  for (const char *isa : kIsas) {
    if (!available(isa)) continue;
    for (int32_t dtype : {PHX_F16, PHX_BF16}) {
      const Format format = dtype == PHX_F16 ? kF16 : kBF16;
      const float big = dtype == PHX_F16 ? 2048 : 256;
      const uint16_t start = encode(format, big), one = encode(format, 1);
      const void *in[] = {&start, &one, &one, &one, &one};
      uint16_t out = 0;
      find_reduce_isa(isa, dtype, PHX_SUM)(&out, in, 5, 1, 5, 1);
      CHECK(decode(format, out) == big + 4);
    }
  }
}

TEST(min_and_max_propagate_nan_and_order_minus_zero_below_zero) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const char *isa : kIsas) {
    if (!available(isa)) continue;
    for (float other : {0.0f, -0.0f, 1.0f, -1.0f, inf, -inf, nan, -nan, 0x1p-149f})
      for (int32_t op : {PHX_MIN, PHX_MAX}) {
        CHECK(std::isnan(combine_f32(isa, op, nan, other)));
        CHECK(std::isnan(combine_f32(isa, op, other, nan)));
        CHECK(std::isnan(combine_f32(isa, op, -nan, other)));
      }
    CHECK(std::signbit(combine_f32(isa, PHX_MIN, 0.0f, -0.0f)));
    CHECK(std::signbit(combine_f32(isa, PHX_MIN, -0.0f, 0.0f)));
    CHECK(!std::signbit(combine_f32(isa, PHX_MAX, 0.0f, -0.0f)));
    CHECK(!std::signbit(combine_f32(isa, PHX_MAX, -0.0f, 0.0f)));
    CHECK(std::signbit(combine_f32(isa, PHX_MAX, -0.0f, -0.0f)));
    CHECK(combine_f32(isa, PHX_MIN, -inf, 0x1p-149f) == -inf);
    CHECK(combine_f32(isa, PHX_MAX, 0x1p-149f, -1.0f) == 0x1p-149f);
  }
}

TEST(special_values_meet_in_all_combinations_with_the_same_bits_everywhere) {
  // NaNs of all kinds included: whatever comes in, one and the same NaN goes out.
  const std::vector<uint32_t> f32 = {0x00000000, 0x80000000, 0x00000001, 0x807fffff, 0x00800000, 0x3f800000,
                                     0xbf800000, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000,
                                     0xffc00001, 0x7f800001, 0xffbfffff, 0x7fffffff};
  for (int32_t dtype : {PHX_F16, PHX_BF16, PHX_F32, PHX_F64})
    for (int32_t op : {PHX_SUM, PHX_AVG, PHX_PROD, PHX_MIN, PHX_MAX, PHX_PREMUL_SUM}) {
      const size_t count = f32.size() * f32.size();
      std::vector<Bytes> in(2, Bytes(count * phx_dtype_size(dtype)));
      for (size_t i = 0; i < count; ++i)
        for (size_t k = 0; k < 2; ++k) {
          const uint32_t bits = f32[k == 0 ? i / f32.size() : i % f32.size()];
          const uint32_t sign = bits >> 31, exponent = bits >> 23 & 0xff, fraction = bits & 0x7fffff;
          const uint32_t small = exponent == 0 || exponent == 0xff ? exponent & 0x1f : exponent == 0xfe ? 0x1e : 0x0f;
          const uint16_t narrow_fraction = static_cast<uint16_t>(fraction >> 13 | (fraction & 1));
          if (dtype == PHX_F16) put(in[k], i, static_cast<uint16_t>(sign << 15 | small << 10 | narrow_fraction));
          if (dtype == PHX_BF16) put(in[k], i, static_cast<uint16_t>(bits >> 16 | (fraction & 1)));
          if (dtype == PHX_F32) put(in[k], i, bits);
          const uint64_t wide = exponent == 0xff   ? 0x7ff
                                : exponent == 0xfe ? 0x7fe
                                : exponent == 0    ? 0
                                                   : exponent + 896;
          if (dtype == PHX_F64) put(in[k], i, static_cast<uint64_t>(sign) << 63 | wide << 52 | fraction);
        }
      expect_all(in, count, dtype, op, 2, 0.5);
      expect_all(in, count, dtype, op, 3, 3);
    }
}

TEST(integer_averages_are_exact_for_every_divisor) {
  std::mt19937_64 random(5);
  std::vector<int64_t> divisors;
  for (int64_t d = 1; d <= 66; ++d) divisors.push_back(d);
  for (int64_t d : {100, 127, 128, 255, 256, 257, 1000, 32767, 32768, 65535, 65536, 65537}) divisors.push_back(d);
  for (int64_t d : {int64_t{16777217}, int64_t{2147483647}, int64_t{2147483648}, int64_t{4294967295}, int64_t{1} << 40})
    divisors.push_back(d);
  for (int32_t dtype = PHX_I8; dtype <= PHX_U64; ++dtype)
    for (int64_t divisor : divisors) {
      // All values of the narrow dtypes; for the others, those around multiples of the divisor, where a quotient turns.
      const size_t count = 65536, size = phx_dtype_size(dtype);
      Bytes bytes(count * size);
      for (size_t i = 0; i < count; ++i) {
        uint64_t value = i;
        if (size > 2)
          value = random() / static_cast<uint64_t>(divisor) * static_cast<uint64_t>(divisor) + random() % 3 - 1;
        if (size == 4) {
          const uint64_t multiples = (is_signed(dtype) ? 0x7fffffffu : 0xffffffffu) / static_cast<uint64_t>(divisor);
          value = (i % 2 == 0 ? multiples - (multiples > 7 ? random() % 8 : 0) : random() % (multiples + 1)) *
                      static_cast<uint64_t>(divisor) +
                  random() % 3 - 1;
          if (is_signed(dtype) && random() % 2 == 0) value = 0 - value;
        }
        for (size_t b = 0; b < size; ++b) bytes[i * size + b] = static_cast<unsigned char>(value >> 8 * b);
      }
      expect_all({bytes}, count, dtype, PHX_AVG, divisor, 1);
    }
}

TEST(integers_wrap_around) {
  for (const char *isa : kIsas) {
    if (!available(isa)) continue;
    const int32_t most = std::numeric_limits<int32_t>::max(), one = 1;
    const void *in[] = {&most, &one};
    int32_t out = 0;
    find_reduce_isa(isa, PHX_I32, PHX_SUM)(&out, in, 2, 1, 2, 1);
    CHECK(out == std::numeric_limits<int32_t>::min());
    find_reduce_isa(isa, PHX_I32, PHX_AVG)(&out, in, 2, 1, 2, 1);
    CHECK(out == -1073741824);
    const uint16_t large = 65535;
    const void *squares[] = {&large, &large};
    uint16_t product = 0;
    find_reduce_isa(isa, PHX_U16, PHX_PROD)(&product, squares, 2, 1, 2, 1);
    CHECK(product == 1);
  }
}

TEST(any_byte_but_zero_is_true_and_results_are_zero_or_one) {
  std::mt19937_64 random(6);
  for (int32_t op : {PHX_SUM, PHX_PROD, PHX_MIN, PHX_MAX, PHX_BAND, PHX_BOR, PHX_BXOR}) {
    std::vector<Bytes> in(3, Bytes(777));
    for (Bytes &bytes : in)
      for (unsigned char &byte : bytes) byte = static_cast<unsigned char>(random() % 2 == 0 ? 0 : random());
    expect_all(in, 777, PHX_BOOL, op, 3, 1);
  }
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
