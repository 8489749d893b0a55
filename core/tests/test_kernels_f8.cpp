// The two kinds of f8 in the reduction kernels: every value, every rounding, and what is too large.
#include "kernel_reference.h"

using namespace kernel_test;

namespace {

constexpr int32_t kKinds[] = {PHX_DTYPE_F8E4M3, PHX_DTYPE_F8E5M2};
constexpr int kOne[] = {0x38, 0x3c};  // 1.0 of each

int one_of(int32_t dtype) { return kOne[dtype == PHX_DTYPE_F8E4M3 ? 0 : 1]; }

// `value` as a kernel rounds it: the product of 1.0 and a scale.
int rounded(ReduceFn premul_sum, int32_t dtype, float value) {
  const uint8_t one = static_cast<uint8_t>(one_of(dtype));
  const void *in[] = {&one};
  uint8_t out = 0;
  premul_sum(&out, in, 1, 1, 1, static_cast<double>(value));
  return out;
}

template <class Body>
void for_each_isa(int32_t dtype, int32_t op, Body &&body) {
  for (const char *isa : kIsas)
    if (available(isa)) body(find_reduce_isa(isa, dtype, op), isa);
}

void expect_rounded(int32_t dtype, float value, int wanted) {
  for_each_isa(dtype, PHX_OP_PREMUL_SUM, [&](ReduceFn fn, const char *isa) {
    const int got = rounded(fn, dtype, value);
    if (got == wanted) return;
    char text[160];
    std::snprintf(text, sizeof text, "%s %s: %a becomes 0x%02x, not 0x%02x", isa, phx_dtype_name(dtype),
                  static_cast<double>(value), static_cast<unsigned>(got), static_cast<unsigned>(wanted));
    check::failed(__FILE__, __LINE__, text);
  });
}

float next(float value) { return std::nextafterf(value, std::numeric_limits<float>::infinity()); }
float before(float value) { return std::nextafterf(value, -std::numeric_limits<float>::infinity()); }

}  // namespace

TEST(the_reference_knows_the_published_values_of_both_kinds) {
  const Format e4m3 = format_of(PHX_DTYPE_F8E4M3), e5m2 = format_of(PHX_DTYPE_F8E5M2);
  CHECK(decode(e4m3, 0x7e) == 448 && decode(e4m3, 0x08) == 0x1p-6 && decode(e4m3, 0x01) == 0x1p-9);
  CHECK(decode(e5m2, 0x7b) == 57344 && decode(e5m2, 0x04) == 0x1p-14 && decode(e5m2, 0x01) == 0x1p-16);
  CHECK(std::isnan(decode(e4m3, 0x7f)) && std::isnan(decode(e4m3, 0xff)) && decode(e4m3, 0x78) == 256);
  CHECK(std::isinf(decode(e5m2, 0x7c)) && decode(e5m2, 0xfc) < 0);
  for (int bits : {0x7d, 0x7e, 0x7f, 0xfd, 0xff}) CHECK(std::isnan(decode(e5m2, bits)));
}

TEST(all_256_values_come_out_as_they_went_in_and_all_nans_as_0x7f) {
  for (int32_t dtype : kKinds)
    for (int32_t op : {PHX_OP_SUM, PHX_OP_AVG, PHX_OP_PROD, PHX_OP_MIN, PHX_OP_MAX, PHX_OP_PREMUL_SUM})
      for_each_isa(dtype, op, [&](ReduceFn fn, const char *) {
        Bytes all(256), out(256);
        for (size_t i = 0; i < 256; ++i) all[i] = static_cast<unsigned char>(i);
        const void *in[] = {all.data()};
        fn(out.data(), in, 1, 256, 1, 1);
        for (size_t i = 0; i < 256; ++i) {
          const bool nan = std::isnan(decode(format_of(dtype), static_cast<int>(i)));
          CHECK(out[i] == (nan ? 0x7f : all[i]));
        }
      });
}

TEST(all_pairs_of_values_combine_as_the_reference_says) {
  for (int32_t dtype : kKinds) {
    std::vector<Bytes> in(2, Bytes(65536));
    for (size_t i = 0; i < 65536; ++i) {
      in[0][i] = static_cast<unsigned char>(i);
      in[1][i] = static_cast<unsigned char>(i >> 8);
    }
    for (int32_t op : {PHX_OP_SUM, PHX_OP_AVG, PHX_OP_PROD, PHX_OP_MIN, PHX_OP_MAX, PHX_OP_PREMUL_SUM})
      expect_all(in, 65536, dtype, op, 2, 0.75);
    expect_all(in, 65536, dtype, PHX_OP_AVG, 3, 1);
  }
}

TEST(numbers_between_two_neighbours_go_to_the_nearer_and_ties_to_the_even_one) {
  for (int32_t dtype : kKinds) {
    const Format format = format_of(dtype);
    for (int low = 0; low + 1 < format.above(); ++low)
      for (int sign : {0, 0x80}) {
        const float a = static_cast<float>(decode(format, low | sign));
        const float b = static_cast<float>(decode(format, (low + 1) | sign));
        const float tie = (a + b) / 2;  // exact: f32 has bits to spare
        const bool up = sign == 0;
        expect_rounded(dtype, tie, (low % 2 == 0 ? low : low + 1) | sign);
        expect_rounded(dtype, up ? before(tie) : next(tie), low | sign);
        expect_rounded(dtype, up ? next(tie) : before(tie), (low + 1) | sign);
        expect_rounded(dtype, next(a), encode(format, next(a)));
        expect_rounded(dtype, before(a), encode(format, before(a)));
      }
  }
}

TEST(too_large_is_the_largest_in_e4m3_and_infinity_in_e5m2) {
  const float inf = std::numeric_limits<float>::infinity(), most = std::numeric_limits<float>::max();
  expect_rounded(PHX_DTYPE_F8E4M3, 464.0f, 0x7e);  // the tie goes to 448, which is even
  expect_rounded(PHX_DTYPE_F8E4M3, -464.0f, 0xfe);
  for (float value : {next(464.0f), 479.0f, 480.0f, 512.0f, 65536.0f, 0x1p40f, most, inf}) {
    expect_rounded(PHX_DTYPE_F8E4M3, value, 0x7e);
    expect_rounded(PHX_DTYPE_F8E4M3, -value, 0xfe);
  }
  expect_rounded(PHX_DTYPE_F8E5M2, before(61440.0f), 0x7b);
  expect_rounded(PHX_DTYPE_F8E5M2, -before(61440.0f), 0xfb);
  for (float value : {61440.0f, 65504.0f, 65520.0f, 65536.0f, 0x1p17f, 0x1p40f, 0x1p120f, most, inf}) {
    expect_rounded(PHX_DTYPE_F8E5M2, value, 0x7c);
    expect_rounded(PHX_DTYPE_F8E5M2, -value, 0xfc);
  }
  for (int32_t dtype : kKinds) expect_rounded(dtype, std::numeric_limits<float>::quiet_NaN(), 0x7f);
}

TEST(too_small_is_a_zero_that_keeps_its_sign) {
  for (int32_t dtype : kKinds) {
    const float half = dtype == PHX_DTYPE_F8E4M3 ? 0x1p-10f : 0x1p-17f;  // of the smallest subnormal
    for (float value : {half, before(half), 0x1p-60f, 0x1p-126f, 0x1p-149f, 0.0f}) {
      expect_rounded(dtype, value, 0);
      expect_rounded(dtype, -value, 0x80);
    }
    expect_rounded(dtype, next(half), 1);
  }
}

// Every sign, exponent and first seven bits of fraction of f32, just below, at and just above.
TEST(f32_of_all_sizes_round_as_the_reference_does) {
  for (int32_t dtype : kKinds) {
    const Format format = format_of(dtype);
    for (uint32_t upper = 0; upper < 0x10000; ++upper)
      for (uint32_t lower : {0x0000u, 0x0001u, 0xffffu}) {
        const uint32_t bits = upper << 16 | lower;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        const int wanted = encode(format, value);
        for_each_isa(dtype, PHX_OP_PREMUL_SUM,
                     [&](ReduceFn fn, const char *) { CHECK(rounded(fn, dtype, value) == wanted); });
      }
  }
}

TEST(sums_are_rounded_once_and_not_after_each_input) {
  // 16 + 0.5 is 16 in e4m3, and 8 + 0.5 is 8 in e5m2; adding four of them must not lose them.
  for (int32_t dtype : kKinds) {
    const Format format = format_of(dtype);
    const float big = dtype == PHX_DTYPE_F8E4M3 ? 16 : 8;
    const uint8_t start = static_cast<uint8_t>(encode(format, big)), half = static_cast<uint8_t>(encode(format, 0.5f));
    const void *in[] = {&start, &half, &half, &half, &half};
    for_each_isa(dtype, PHX_OP_SUM, [&](ReduceFn fn, const char *) {
      uint8_t out = 0;
      fn(&out, in, 5, 1, 5, 1);
      CHECK(decode(format, out) == big + 2);
    });
  }
  // Nor does a sum overflow on the way: 448 + 448 - 448 is 448.
  const uint8_t most = 0x7e, minus = 0xfe;
  const void *in[] = {&most, &most, &minus};
  for_each_isa(PHX_DTYPE_F8E4M3, PHX_OP_SUM, [&](ReduceFn fn, const char *) {
    uint8_t out = 0;
    fn(&out, in, 3, 1, 3, 1);
    CHECK(out == most);
  });
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
