// Random elements: against the published vectors, a plain rendering of the paper, and libm; alike in every piece.
#include <cmath>
#include <vector>

#include "check.h"
#include "kernels/random.h"
#include "kernels/random_elements.h"

namespace {

using phx::random::FillFn;
using phx::random::Settings;

constexpr uint64_t kKey = 0x0123456789abcdef;
const char *const kIsas[] = {"scalar", "avx2", "avx512", "neon"};

// Elements [first, first + count) of a tensor of one dim.
template <class T>
std::vector<T> fill(int32_t dtype, int32_t kind, double a, double b, size_t count, uint64_t first = 0,
                    uint64_t key = kKey) {
  std::vector<T> out(count);
  const int64_t size = static_cast<int64_t>(count), step = 1;
  CHECK_OK(phx_random_fill(out.data(), dtype, kind, a, b, key, first, 1, &size, &step, &step));
  return out;
}

struct Words {
  uint32_t w[4];
};
void is_philox(const Words &counter, uint32_t key0, uint32_t key1, const Words &expected) {
  phx::random::Block block;
  std::memcpy(&block, &counter, sizeof block);
  const phx::random::Block made = phx::random::philox(block, key0, key1);
  for (int i = 0; i < 4; ++i) CHECK(made.word[i] == expected.w[i]);
}

TEST(the_generator_gives_the_published_vectors) {  // kat_vectors of the authors' Random123, philox4x32 10
  is_philox({{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
  is_philox({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
  is_philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0,
            {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
  const std::vector<uint32_t> words = fill<uint32_t>(PHX_DTYPE_U32, PHX_RANDOM_BITS, 0, 0, 4, 0, 0);
  CHECK(words[0] == 0x6627e8d5 && words[1] == 0xe169c58d && words[2] == 0xbc57ac4c && words[3] == 0x9b00dbd8);
}

TEST(bits_are_the_words_in_order_also_beyond_two_to_the_32_blocks) {
  const uint64_t first = (uint64_t{1} << 34) - 6;  // the block number passes 2^32
  const std::vector<uint32_t> narrow = fill<uint32_t>(PHX_DTYPE_U32, PHX_RANDOM_BITS, 0, 0, 100, first);
  for (size_t i = 0; i < narrow.size(); ++i) {
    const uint64_t at = first + i;
    CHECK(narrow[i] == phx::random::block_of(kKey, at / 4).word[at % 4]);
  }
  const std::vector<uint64_t> wide = fill<uint64_t>(PHX_DTYPE_I64, PHX_RANDOM_BITS, 0, 0, 100, first);
  for (size_t i = 0; i < wide.size(); ++i) {
    const phx::random::Block block = phx::random::block_of(kKey, (first + i) / 2);
    const size_t low = (first + i) % 2 * 2;
    CHECK(wide[i] == (block.word[low] | static_cast<uint64_t>(block.word[low + 1]) << 32));
  }
}

TEST(every_instruction_set_gives_the_same_bits) {
  constexpr size_t kCount = 3001;
  Settings settings;
  settings.offset = 0.3;
  settings.scale = 1.7;
  settings.bound = 1.9;
  settings.limit = 0x40000000;
  settings.low = -9;
  settings.range = 1000;
  int compared = 0;
  for (const char *isa : kIsas)
    for (int32_t kind : {1, 2, 3, 4, 5, 6, 7, 100, 101})
      for (int32_t dtype = PHX_DTYPE_F16; dtype <= PHX_DTYPE_F8E5M2; ++dtype) {
        const FillFn fill = phx::random::find_fill_isa(isa, kind, dtype);
        const FillFn reference = phx::random::find_scalar(kind, dtype);
        if (phx::random::find_fill_isa(isa, PHX_RANDOM_UNIFORM, PHX_DTYPE_F32) == nullptr) continue;
        CHECK((fill == nullptr) == (reference == nullptr));
        if (fill == nullptr) continue;
        const size_t bytes = kCount * phx_dtype_size(dtype);
        std::vector<char> one(bytes), other(bytes);
        fill(one.data(), kCount, 5, kKey, settings);
        reference(other.data(), kCount, 5, kKey, settings);
        CHECK(std::memcmp(one.data(), other.data(), bytes) == 0);
        ++compared;
      }
  CHECK(compared >= 60);
}

// Each stretch of any place and length, as cut out of the whole.
template <class T>
void is_alike_in_pieces(int32_t dtype, int32_t kind, double a, double b) {
  const std::vector<T> whole = fill<T>(dtype, kind, a, b, 2100);
  for (size_t first : {0, 1, 2, 3, 5, 1023, 1026})
    for (size_t count : {1, 2, 3, 4, 7, 33, 1024, 1031}) {
      const std::vector<T> piece = fill<T>(dtype, kind, a, b, count, first);
      CHECK(std::memcmp(piece.data(), whole.data() + first, count * sizeof(T)) == 0);
    }
}
TEST(a_piece_has_the_elements_of_the_whole) {
  for (int32_t kind : {PHX_RANDOM_UNIFORM, PHX_RANDOM_NORMAL, PHX_RANDOM_LOG_NORMAL, PHX_RANDOM_CAUCHY}) {
    is_alike_in_pieces<float>(PHX_DTYPE_F32, kind, 0, 1);
    is_alike_in_pieces<double>(PHX_DTYPE_F64, kind, 0, 1);
    is_alike_in_pieces<uint16_t>(PHX_DTYPE_F16, kind, 0, 1);
    is_alike_in_pieces<uint16_t>(PHX_DTYPE_BF16, kind, 0, 1);
  }
  is_alike_in_pieces<float>(PHX_DTYPE_F32, PHX_RANDOM_EXPONENTIAL, 2, 0);
  is_alike_in_pieces<uint8_t>(PHX_DTYPE_BOOL, PHX_RANDOM_BERNOULLI, 0.3, 0);
}

TEST(a_box_with_gaps_and_turned_dims_has_the_elements_of_the_whole) {
  // The box [1:4, 2:7, 5:8] of a [5, 9, 11] tensor, stored with its dims in the order 1, 2, 0.
  const std::vector<float> whole = fill<float>(PHX_DTYPE_F32, PHX_RANDOM_NORMAL, 0, 1, 5 * 9 * 11);
  const int64_t sizes[] = {3, 5, 3}, index_strides[] = {99, 11, 1}, out_strides[] = {1, 12, 4};
  std::vector<float> out(64, -77.0f);
  CHECK_OK(phx_random_fill(out.data(), PHX_DTYPE_F32, PHX_RANDOM_NORMAL, 0, 1, kKey, 99 + 22 + 5, 3, sizes,
                           index_strides, out_strides));
  size_t written = 0;
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 5; ++j)
      for (int k = 0; k < 3; ++k, ++written)
        CHECK(out[static_cast<size_t>(i + 12 * j + 4 * k)] ==
              whole[static_cast<size_t>((i + 1) * 99 + (j + 2) * 11 + k + 5)]);
  for (float value : out) written += value == -77.0f;
  CHECK(written == out.size());
  // Only every 11th element: none shares a block with another.
  const int64_t one[] = {9}, apart[] = {11}, close[] = {1};
  CHECK_OK(phx_random_fill(out.data(), PHX_DTYPE_F32, PHX_RANDOM_NORMAL, 0, 1, kKey, 4, 1, one, apart, close));
  for (size_t i = 0; i < 9; ++i) CHECK(out[i] == whole[4 + 11 * i]);
  // No dims: one element. An empty box: none, and no memory is needed.
  CHECK_OK(phx_random_fill(out.data(), PHX_DTYPE_F32, PHX_RANDOM_NORMAL, 0, 1, kKey, 7, 0, nullptr, nullptr, nullptr));
  CHECK(out[0] == whole[7]);
  const int64_t none[] = {0};
  CHECK_OK(phx_random_fill(nullptr, PHX_DTYPE_F32, PHX_RANDOM_NORMAL, 0, 1, kKey, 0, 1, none, apart, close));
}

// How far a float is from the exact value, in units of its last place.
double apart(double made, double exact, int bits) {
  int exponent = 0;
  std::frexp(exact, &exponent);
  return std::fabs(made - exact) / std::ldexp(1.0, exponent - bits);
}
TEST(functions_are_right_to_two_or_three_units_in_the_last_place) {
  double log32 = 0, log64 = 0, exp32 = 0, exp64 = 0, turn32 = 0, turn64 = 0;
  const auto more = [](double &worst, double next) { worst = next > worst ? next : worst; };
  for (uint64_t i = 0; i < 100000; ++i) {
    const phx::random::Block block = phx::random::block_of(kKey, i);
    const uint32_t narrow = block.word[0] >> (i % 31);
    const uint64_t wide = (block.word[2] | static_cast<uint64_t>(block.word[3]) << 32) >> (i % 50);
    const float x = phx::random::positive(narrow);
    const double y = phx::random::positive(wide);
    if (x < 1) more(log32, apart(phx::random::minus_log(x), -std::log(static_cast<double>(x)), 24));
    if (y < 1)
      more(log64, apart(phx::random::minus_log(y), static_cast<double>(-std::log(static_cast<long double>(y))), 53));
    const float e = (x - 0.5f) * 170;
    more(exp32, apart(phx::random::exponential(e), std::exp(static_cast<double>(e)), 24));
    const double f = (y - 0.5) * 1400;
    more(exp64, apart(phx::random::exponential(f), static_cast<double>(std::exp(static_cast<long double>(f))), 53));
    const long double turns = 6.283185307179586476925286766559L;
    const long double angle32 = turns * block.word[1] / 0x1p32L, angle64 = turns * (wide >> 10) / 0x1p54L;
    const auto at32 = phx::random::turn(block.word[1]);
    const auto at64 = phx::random::turn(wide);
    more(turn32, std::fabs(at32.first - static_cast<double>(cosl(angle32))) / 0x1p-24);
    more(turn32, std::fabs(at32.second - static_cast<double>(sinl(angle32))) / 0x1p-24);
    more(turn64, static_cast<double>(fabsl(at64.first - cosl(angle64)) / 0x1p-53L));
    more(turn64, static_cast<double>(fabsl(at64.second - sinl(angle64)) / 0x1p-53L));
  }
  std::fprintf(stderr, "    log %.2f %.2f, exp %.2f %.2f, sin and cos %.2f %.2f\n", log32, log64, exp32, exp64, turn32,
               turn64);
  CHECK(log32 < 3 && log64 < 3 && exp32 < 2 && exp64 < 2 && turn32 < 2 && turn64 < 2);
}

double as_double(float value) { return value; }
double as_double(double value) { return value; }
template <class T>
void has_moments(const std::vector<T> &values, double mean, double variance) {
  double sum = 0, squares = 0;
  for (T value : values) sum += as_double(value);
  const double count = static_cast<double>(values.size()), average = sum / count;
  for (T value : values) squares += (as_double(value) - average) * (as_double(value) - average);
  CHECK(std::fabs(average - mean) < 5 * std::sqrt(variance / count));
  CHECK(std::fabs(squares / count - variance) < 0.02 * variance);
}
TEST(elements_have_the_mean_and_the_variance_of_their_kind) {
  constexpr size_t kMany = 1000000;
  has_moments(fill<float>(PHX_DTYPE_F32, PHX_RANDOM_UNIFORM, -1, 3, kMany), 1, 16.0 / 12);
  has_moments(fill<double>(PHX_DTYPE_F64, PHX_RANDOM_UNIFORM, 0, 1, kMany), 0.5, 1.0 / 12);
  has_moments(fill<float>(PHX_DTYPE_F32, PHX_RANDOM_NORMAL, 2, 3, kMany), 2, 9);
  has_moments(fill<double>(PHX_DTYPE_F64, PHX_RANDOM_NORMAL, 0, 1, kMany), 0, 1);
  has_moments(fill<float>(PHX_DTYPE_F32, PHX_RANDOM_EXPONENTIAL, 2, 0, kMany), 0.5, 0.25);
  has_moments(fill<double>(PHX_DTYPE_F64, PHX_RANDOM_EXPONENTIAL, 0.5, 0, kMany), 2, 4);
  has_moments(fill<float>(PHX_DTYPE_F32, PHX_RANDOM_BERNOULLI, 0.3, 0, kMany), 0.3, 0.21);
  has_moments(fill<float>(PHX_DTYPE_F32, PHX_RANDOM_LOG_NORMAL, 0, 0.25, kMany), std::exp(0.03125),
              std::expm1(0.0625) * std::exp(0.0625));
}

TEST(uniform_elements_never_reach_their_upper_bound) {
  // A range of three units in the last place: nearly every product rounds to one of its ends.
  const double low = 1, high = 1 + 3 * 0x1p-23;
  for (float value : fill<float>(PHX_DTYPE_F32, PHX_RANDOM_UNIFORM, low, high, 10000))
    CHECK(value >= low && value < high);
  for (double value : fill<double>(PHX_DTYPE_F64, PHX_RANDOM_UNIFORM, 1, 1 + 0x1p-52, 100)) CHECK(value == 1);
  for (uint16_t bits : fill<uint16_t>(PHX_DTYPE_F16, PHX_RANDOM_UNIFORM, 0, 1, 100000)) CHECK(bits < 0x3c00);
  for (uint16_t bits : fill<uint16_t>(PHX_DTYPE_BF16, PHX_RANDOM_UNIFORM, 0, 1, 100000)) CHECK(bits < 0x3f80);
  for (float value : fill<float>(PHX_DTYPE_F32, PHX_RANDOM_UNIFORM, -1, 0, 100000)) CHECK(value >= -1 && value < 0);
  for (float value : fill<float>(PHX_DTYPE_F32, PHX_RANDOM_UNIFORM, 2.5, 2.5, 100)) CHECK(value == 2.5f);
  for (float value : fill<float>(PHX_DTYPE_F32, PHX_RANDOM_EXPONENTIAL, 1e30, 0, 100000)) CHECK(value > 0);
}

TEST(bernoulli_elements_of_probability_0_and_1_are_sure) {
  for (uint8_t value : fill<uint8_t>(PHX_DTYPE_BOOL, PHX_RANDOM_BERNOULLI, 0, 0, 5000)) CHECK(value == 0);
  for (double value : fill<double>(PHX_DTYPE_F64, PHX_RANDOM_BERNOULLI, 1, 0, 5000)) CHECK(value == 1);
}

template <class T>
std::vector<T> integers(int32_t dtype, int64_t low, uint64_t range, size_t count) {
  std::vector<T> out(count);
  const int64_t size = static_cast<int64_t>(count), step = 1;
  CHECK_OK(phx_random_integers(out.data(), dtype, low, range, kKey, 0, 1, &size, &step, &step));
  return out;
}
TEST(integers_are_in_their_range_and_reach_its_ends) {
  size_t seen[7] = {};
  for (int8_t value : integers<int8_t>(PHX_DTYPE_I8, -3, 7, 70000)) {
    CHECK(value >= -3 && value <= 3);
    ++seen[value + 3];
  }
  for (size_t count : seen) CHECK(count > 9500 && count < 10500);
  bool negative = false, large = false;
  for (int64_t value : integers<int64_t>(PHX_DTYPE_I64, INT64_MIN, 0, 1000)) {
    negative = negative || value < 0;
    large = large || value > (int64_t{1} << 61);
  }
  CHECK(negative && large);
  for (int64_t value : integers<int64_t>(PHX_DTYPE_I64, -5, uint64_t{3} << 40, 1000))
    CHECK(value >= -5 && value < (int64_t{3} << 40) - 5);
  for (float value : integers<float>(PHX_DTYPE_F32, 0, (1 << 24) + 1, 1000)) CHECK(value >= 0 && value <= (1 << 24));
  for (uint8_t value : integers<uint8_t>(PHX_DTYPE_BOOL, 0, 2, 1000)) CHECK(value <= 1);
  for (int32_t value : integers<int32_t>(PHX_DTYPE_I32, 42, 1, 1000)) CHECK(value == 42);
}

TEST(half_floats_are_rounded_to_the_nearest_even) {
  CHECK(phx::random::f16_of(1.0f) == 0x3c00 && phx::random::f16_of(-2.0f) == 0xc000 && phx::random::f16_of(0.0f) == 0);
  CHECK(phx::random::f16_of(1.0f + 0x1p-11f) == 0x3c00 && phx::random::f16_of(1.0f + 0x3p-11f) == 0x3c02);
  CHECK(phx::random::f16_of(65504.0f) == 0x7bff && phx::random::f16_of(65519.9f) == 0x7bff);
  CHECK(phx::random::f16_of(65520.0f) == 0x7c00 && phx::random::f16_of(-INFINITY) == 0xfc00);
  CHECK(phx::random::f16_of(0x1p-24f) == 1 && phx::random::f16_of(0x1p-25f) == 0 && phx::random::f16_of(0x3p-25f) == 2);
  CHECK(phx::random::f16_of(NAN) == 0x7e00 && phx::random::bf16_of(NAN) == 0x7fc0);
  CHECK(phx::random::bf16_of(1.0f + 0x1p-8f) == 0x3f80 && phx::random::bf16_of(1.0f + 0x3p-8f) == 0x3f82);
}

TEST(wrong_arguments_are_named) {
  float out[8] = {};
  const int64_t size[] = {8}, step[] = {1}, bad[] = {-1};
  const auto call = [&](int32_t dtype, int32_t kind, double a, double b) {
    return phx_random_fill(out, dtype, kind, a, b, kKey, 0, 1, size, step, step);
  };
  CHECK_FAILS(PHX_ERR_INVALID, "unknown kind 0", call(PHX_DTYPE_F32, 0, 0, 1));
  CHECK_FAILS(PHX_ERR_INVALID, "unknown kind 8", call(PHX_DTYPE_F32, 8, 0, 1));
  CHECK_FAILS(PHX_ERR_UNSUPPORTED, "int32", call(PHX_DTYPE_I32, PHX_RANDOM_UNIFORM, 0, 1));
  CHECK_FAILS(PHX_ERR_UNSUPPORTED, "float8_e4m3fn", call(PHX_DTYPE_F8E4M3, PHX_RANDOM_NORMAL, 0, 1));
  CHECK_FAILS(PHX_ERR_UNSUPPORTED, "?", call(99, PHX_RANDOM_NORMAL, 0, 1));
  CHECK_FAILS(PHX_ERR_INVALID, "must not be above b", call(PHX_DTYPE_F32, PHX_RANDOM_UNIFORM, 1, 0));
  CHECK_FAILS(PHX_ERR_INVALID, "finite", call(PHX_DTYPE_F32, PHX_RANDOM_UNIFORM, -3e38, 3e38));
  CHECK_FAILS(PHX_ERR_INVALID, "finite", call(PHX_DTYPE_F32, PHX_RANDOM_UNIFORM, 0, NAN));
  CHECK_FAILS(PHX_ERR_INVALID, "finite", call(PHX_DTYPE_F16, PHX_RANDOM_UNIFORM, 0, 70000));
  CHECK_FAILS(PHX_ERR_INVALID, "finite", call(PHX_DTYPE_F16, PHX_RANDOM_UNIFORM, -40000, 40000));
  CHECK_FAILS(PHX_ERR_INVALID, "finite", call(PHX_DTYPE_BF16, PHX_RANDOM_UNIFORM, 0, 3.4e38));
  CHECK_FAILS(PHX_ERR_INVALID, "standard deviation", call(PHX_DTYPE_F32, PHX_RANDOM_NORMAL, 0, -1));
  CHECK_FAILS(PHX_ERR_INVALID, "rate", call(PHX_DTYPE_F32, PHX_RANDOM_EXPONENTIAL, 0, 0));
  CHECK_FAILS(PHX_ERR_INVALID, "probability", call(PHX_DTYPE_F32, PHX_RANDOM_BERNOULLI, 1.5, 0));
  CHECK_FAILS(PHX_ERR_INVALID, "scale", call(PHX_DTYPE_F32, PHX_RANDOM_CAUCHY, 0, 0));
  CHECK_FAILS(PHX_ERR_INVALID, "ndim", phx_random_fill(out, PHX_DTYPE_F32, 2, 0, 1, kKey, 0, 65, size, step, step));
  CHECK_FAILS(PHX_ERR_INVALID, "NULL", phx_random_fill(out, PHX_DTYPE_F32, 2, 0, 1, kKey, 0, 1, nullptr, step, step));
  CHECK_FAILS(PHX_ERR_INVALID, "NULL", phx_random_fill(nullptr, PHX_DTYPE_F32, 2, 0, 1, kKey, 0, 1, size, step, step));
  CHECK_FAILS(PHX_ERR_INVALID, "sizes[0] is -1",
              phx_random_fill(out, PHX_DTYPE_F32, 2, 0, 1, kKey, 0, 1, bad, step, step));
  for (float value : out) CHECK(value == 0);
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
