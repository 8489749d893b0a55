// Complex numbers in the reduction kernels.
#include "kernel_reference.h"

using namespace kernel_test;

namespace {

template <class T>
struct Number {
  T re, im;
};

template <class T>
Number<T> combined(const char *isa, int32_t op, std::vector<Number<T>> x, int64_t divisor = 1, double scale = 1) {
  std::vector<const void *> in;
  for (const Number<T> &number : x) in.push_back(&number);
  Number<T> out{};
  const int32_t dtype = sizeof(T) == 4 ? PHX_DTYPE_C64 : PHX_DTYPE_C128;
  find_reduce_isa(isa, dtype, op)(&out, in.data(), static_cast<int>(in.size()), 1, divisor, scale);
  return out;
}

template <class T>
void expect_closed_forms() {
  for (const char *isa : kIsas) {
    if (!available(isa)) continue;
    const Number<T> sum = combined<T>(isa, PHX_OP_SUM, {{1, 2}, {3, -4}, {5, 6}});
    CHECK(sum.re == 9 && sum.im == 4);
    const Number<T> average = combined<T>(isa, PHX_OP_AVG, {{1, 2}, {3, -4}}, 2);
    CHECK(average.re == 2 && average.im == -1);
    const Number<T> scaled = combined<T>(isa, PHX_OP_PREMUL_SUM, {{1, 2}, {3, -4}}, 1, -0.5);
    CHECK(scaled.re == -2 && scaled.im == 1);
    const Number<T> product = combined<T>(isa, PHX_OP_PROD, {{1, 2}, {3, -4}, {0, 1}});  // (11 + 2i) i
    CHECK(product.re == -2 && product.im == 11);
  }
}

// With a * c = b * d after rounding, but not before, a fused multiply-add shows.
template <class T>
void expect_no_fusion() {
  const T tiny = sizeof(T) == 4 ? T(0x1p-12) : T(0x1p-27);
  const T a = 1 + tiny, b = 1 + 2 * tiny;
  for (const char *isa : kIsas) {
    if (!available(isa)) continue;
    const Number<T> real = combined<T>(isa, PHX_OP_PROD, {{a, b}, {a, 1}});  // a * a - b * 1, and a * 1 + b * a
    CHECK(real.re == 0);
    const Number<T> imaginary = combined<T>(isa, PHX_OP_PROD, {{a, -b}, {1, a}});  // ..., and a * a - b * 1
    CHECK(imaginary.im == 0);
  }
}

}  // namespace

TEST(sums_averages_and_products_have_their_closed_forms) {
  expect_closed_forms<float>();
  expect_closed_forms<double>();
}

TEST(no_multiplication_is_fused_with_an_addition) {
  expect_no_fusion<float>();
  expect_no_fusion<double>();
}

TEST(each_part_that_is_nan_is_the_same_nan_and_leaves_the_other_alone) {
  const uint32_t odd_nan = 0xff812345;
  float nan;
  std::memcpy(&nan, &odd_nan, sizeof nan);
  for (const char *isa : kIsas) {
    if (!available(isa)) continue;
    const Number<float> sum = combined<float>(isa, PHX_OP_SUM, {{nan, 1}, {1, 2}});
    uint32_t bits = 0;
    std::memcpy(&bits, &sum.re, sizeof bits);
    CHECK(bits == 0x7fc00000 && sum.im == 3);
  }
}

TEST(special_values_multiply_by_the_plain_formula) {
  const double inf = std::numeric_limits<double>::infinity();
  const double specials[] = {0.0, -0.0, 1.0, -2.5, inf, -inf, std::nan(""), 0x1p-149, 3e38};
  constexpr size_t kSpecials = sizeof specials / sizeof specials[0], kPairs = kSpecials * kSpecials;
  for (int32_t dtype : {PHX_DTYPE_C64, PHX_DTYPE_C128}) {
    std::vector<Bytes> in(2, Bytes(kPairs * kPairs * phx_dtype_size(dtype)));
    for (size_t i = 0; i < kPairs * kPairs; ++i)
      for (size_t k = 0; k < 2; ++k) {
        const size_t pair = k == 0 ? i / kPairs : i % kPairs;
        const double parts[] = {specials[pair / kSpecials], specials[pair % kSpecials]};
        for (size_t p = 0; p < 2; ++p) {
          if (dtype == PHX_DTYPE_C64) put(in[k], 2 * i + p, static_cast<float>(parts[p]));
          if (dtype == PHX_DTYPE_C128) put(in[k], 2 * i + p, parts[p]);
        }
      }
    for (int32_t op : {PHX_OP_SUM, PHX_OP_AVG, PHX_OP_PROD, PHX_OP_PREMUL_SUM})
      expect_all(in, kPairs * kPairs, dtype, op, 3, 0.5);
  }
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
