// The reduction kernels against a naive reference, for every dtype, op and instruction set of this host.
#include "kernel_reference.h"

using namespace kernel_test;

namespace {

constexpr size_t kCounts[] = {0, 1, 3, 17, 63, 64, 65, 255, 256, 257, 1000, 4099};
constexpr int kInputs[] = {1, 2, 3, 4, 5, 8, 17};

// Inputs of one element each, given as bits of f32.
float combine_f32(const char *isa, int32_t op, float a, float b) {
  const void *in[] = {&a, &b};
  float out = 0;
  find_reduce_isa(isa, PHX_DTYPE_F32, op)(&out, in, 2, 1, 2, 1);
  return out;
}

}  // namespace

TEST(every_pair_that_is_defined_has_a_kernel_and_no_other_has) {
  for (int32_t dtype = -1; dtype <= PHX_DTYPE_F8E5M2 + 1; ++dtype)
    for (int32_t op = -1; op <= PHX_OP_PREMUL_SUM + 1; ++op) {
      const bool known =
          dtype >= PHX_DTYPE_F16 && dtype <= PHX_DTYPE_F8E5M2 && op >= PHX_OP_SUM && op <= PHX_OP_PREMUL_SUM;
      const bool defined = known && is_defined(dtype, op);
      CHECK((phx::kernels::find_reduce(dtype, op) != nullptr) == defined);
      for (const char *isa : kIsas) CHECK((find_reduce_isa(isa, dtype, op) != nullptr) == (defined && available(isa)));
    }
}

TEST(scalar_is_everywhere_and_the_active_instruction_set_is_an_available_one) {
  CHECK(available("scalar"));
  CHECK(!available("no such thing"));
  CHECK(available(phx::kernels::active_isa()));
  CHECK(phx::kernels::find_reduce(PHX_DTYPE_BF16, PHX_OP_SUM) ==
        find_reduce_isa(phx::kernels::active_isa(), PHX_DTYPE_BF16, PHX_OP_SUM));
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
  const Bytes bytes = random_elements(random, PHX_DTYPE_F32, 333);
  const Bytes wanted = reference({bytes, bytes}, 333, PHX_DTYPE_F32, PHX_OP_SUM, 2, 1);
  for (const char *isa : kIsas) {
    if (!available(isa)) continue;
    Bytes out(bytes.size());
    const void *in[] = {bytes.data(), bytes.data()};
    find_reduce_isa(isa, PHX_DTYPE_F32, PHX_OP_SUM)(out.data(), in, 2, 333, 2, 1);
    CHECK(out == wanted);
  }
}

TEST(all_65536_values_of_f16_and_bf16_widen_and_round_as_the_reference_does) {
  for (int32_t dtype : {PHX_DTYPE_F16, PHX_DTYPE_BF16}) {
    const Format format = format_of(dtype);
    Bytes all(65536 * 2);
    for (size_t i = 0; i < 65536; ++i) put(all, i, static_cast<uint16_t>(i));
    // The reference itself: decoding and encoding again is the identity.
    for (size_t i = 0; i < 65536; ++i) {
      const double value = decode(format, static_cast<int>(i));
      CHECK(std::isnan(value) || encode(format, static_cast<float>(value)) == static_cast<int>(i));
    }
    expect_all({all}, 65536, dtype, PHX_OP_SUM, 1, 1);
    // Products that are not representable, from far below the smallest to far above the largest number.
    for (double scale : {1.0 / 3, 0.7, 1.5, -2.25, 0x1p-1, 0x1p-3, 0x1.8p-9, 0x1.ffep-14, 0x1p-24, 0x1p-30, 0x1p8,
                         0x1.fp15, 0x1p120, 0x1p-126})
      expect_all({all}, 65536, dtype, PHX_OP_PREMUL_SUM, 1, scale);
    // Sums that lie halfway between two numbers, or just beside.
    for (double other : {0x1p-25, 0x1p-24, 0x1.8p-24, 0x1p-14, 0x1p-11, 0x1.004p-11, 0x1p-8, 0x1p-9, 1.0, 16.0, 65504.0,
                         -65504.0, 0x1p-133, 0x1p127}) {
      Bytes addend(all.size());
      for (size_t i = 0; i < 65536; ++i)
        put(addend, i, static_cast<uint16_t>(encode(format, static_cast<float>(other))));
      expect_all({all, addend}, 65536, dtype, PHX_OP_SUM, 2, 1);
      expect_all({addend, all}, 65536, dtype, PHX_OP_MIN, 2, 1);
      expect_all({all, addend}, 65536, dtype, PHX_OP_MAX, 2, 1);
    }
  }
}

TEST(f16_and_bf16_round_once_and_not_after_each_input) {
  // 2048 + 1 is 2048 in f16, and 256 + 1 is 256 in bf16; adding four ones at once must not lose them.
  for (const char *isa : kIsas) {
    if (!available(isa)) continue;
    for (int32_t dtype : {PHX_DTYPE_F16, PHX_DTYPE_BF16}) {
      const Format format = format_of(dtype);
      const float big = dtype == PHX_DTYPE_F16 ? 2048 : 256;
      const uint16_t start = static_cast<uint16_t>(encode(format, big)), one = static_cast<uint16_t>(encode(format, 1));
      const void *in[] = {&start, &one, &one, &one, &one};
      uint16_t out = 0;
      find_reduce_isa(isa, dtype, PHX_OP_SUM)(&out, in, 5, 1, 5, 1);
      CHECK(decode(format, out) == big + 4);
    }
  }
}

TEST(min_and_max_propagate_nan_and_order_minus_zero_below_zero) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const char *isa : kIsas) {
    if (!available(isa)) continue;
    for (float other : {0.0f, -0.0f, 1.0f, -1.0f, inf, -inf, nan, -nan, 0x1p-149f})
      for (int32_t op : {PHX_OP_MIN, PHX_OP_MAX}) {
        CHECK(std::isnan(combine_f32(isa, op, nan, other)));
        CHECK(std::isnan(combine_f32(isa, op, other, nan)));
        CHECK(std::isnan(combine_f32(isa, op, -nan, other)));
      }
    CHECK(std::signbit(combine_f32(isa, PHX_OP_MIN, 0.0f, -0.0f)));
    CHECK(std::signbit(combine_f32(isa, PHX_OP_MIN, -0.0f, 0.0f)));
    CHECK(!std::signbit(combine_f32(isa, PHX_OP_MAX, 0.0f, -0.0f)));
    CHECK(!std::signbit(combine_f32(isa, PHX_OP_MAX, -0.0f, 0.0f)));
    CHECK(std::signbit(combine_f32(isa, PHX_OP_MAX, -0.0f, -0.0f)));
    CHECK(combine_f32(isa, PHX_OP_MIN, -inf, 0x1p-149f) == -inf);
    CHECK(combine_f32(isa, PHX_OP_MAX, 0x1p-149f, -1.0f) == 0x1p-149f);
  }
}

TEST(special_values_meet_in_all_combinations_with_the_same_bits_everywhere) {
  // NaNs of all kinds included: whatever comes in, one and the same NaN goes out.
  const std::vector<uint32_t> f32 = {0x00000000, 0x80000000, 0x00000001, 0x807fffff, 0x00800000, 0x3f800000,
                                     0xbf800000, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000,
                                     0xffc00001, 0x7f800001, 0xffbfffff, 0x7fffffff};
  for (int32_t dtype : {PHX_DTYPE_F16, PHX_DTYPE_BF16, PHX_DTYPE_F32, PHX_DTYPE_F64})
    for (int32_t op : {PHX_OP_SUM, PHX_OP_AVG, PHX_OP_PROD, PHX_OP_MIN, PHX_OP_MAX, PHX_OP_PREMUL_SUM}) {
      const size_t count = f32.size() * f32.size();
      std::vector<Bytes> in(2, Bytes(count * phx_dtype_size(dtype)));
      for (size_t i = 0; i < count; ++i)
        for (size_t k = 0; k < 2; ++k) {
          const uint32_t bits = f32[k == 0 ? i / f32.size() : i % f32.size()];
          const uint32_t sign = bits >> 31, exponent = bits >> 23 & 0xff, fraction = bits & 0x7fffff;
          const uint32_t small = exponent == 0 || exponent == 0xff ? exponent & 0x1f : exponent == 0xfe ? 0x1e : 0x0f;
          const uint16_t narrow_fraction = static_cast<uint16_t>(fraction >> 13 | (fraction & 1));
          if (dtype == PHX_DTYPE_F16) put(in[k], i, static_cast<uint16_t>(sign << 15 | small << 10 | narrow_fraction));
          if (dtype == PHX_DTYPE_BF16) put(in[k], i, static_cast<uint16_t>(bits >> 16 | (fraction & 1)));
          if (dtype == PHX_DTYPE_F32) put(in[k], i, bits);
          const uint64_t wide = exponent == 0xff   ? 0x7ff
                                : exponent == 0xfe ? 0x7fe
                                : exponent == 0    ? 0
                                                   : exponent + 896;
          if (dtype == PHX_DTYPE_F64) put(in[k], i, static_cast<uint64_t>(sign) << 63 | wide << 52 | fraction);
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
  for (int32_t dtype = PHX_DTYPE_I8; dtype <= PHX_DTYPE_U64; ++dtype)
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
      expect_all({bytes}, count, dtype, PHX_OP_AVG, divisor, 1);
    }
}

TEST(integers_wrap_around) {
  for (const char *isa : kIsas) {
    if (!available(isa)) continue;
    const int32_t most = std::numeric_limits<int32_t>::max(), one = 1;
    const void *in[] = {&most, &one};
    int32_t out = 0;
    find_reduce_isa(isa, PHX_DTYPE_I32, PHX_OP_SUM)(&out, in, 2, 1, 2, 1);
    CHECK(out == std::numeric_limits<int32_t>::min());
    find_reduce_isa(isa, PHX_DTYPE_I32, PHX_OP_AVG)(&out, in, 2, 1, 2, 1);
    CHECK(out == -1073741824);
    const uint16_t large = 65535;
    const void *squares[] = {&large, &large};
    uint16_t product = 0;
    find_reduce_isa(isa, PHX_DTYPE_U16, PHX_OP_PROD)(&product, squares, 2, 1, 2, 1);
    CHECK(product == 1);
  }
}

TEST(any_byte_but_zero_is_true_and_results_are_zero_or_one) {
  std::mt19937_64 random(6);
  for (int32_t op : {PHX_OP_SUM, PHX_OP_PROD, PHX_OP_MIN, PHX_OP_MAX, PHX_OP_BAND, PHX_OP_BOR, PHX_OP_BXOR}) {
    std::vector<Bytes> in(3, Bytes(777));
    for (Bytes &bytes : in)
      for (unsigned char &byte : bytes) byte = static_cast<unsigned char>(random() % 2 == 0 ? 0 : random());
    expect_all(in, 777, PHX_DTYPE_BOOL, op, 3, 1);
  }
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
