// phalanx.hpp: what can be a buffer, and its dtype.
#include <array>
#include <string>

#include "hpp.h"

using phalanx::Buffer;
using phalanx::ConstBuffer;
using phalanx::Dtype;

struct Half {
  uint16_t bits;
};
template <>
struct phalanx::DtypeOf<Half> {
  static constexpr Dtype value = Dtype::f16;
};

TEST(the_element_type_of_a_container_says_the_dtype) {
  const std::vector<float> floats(3);
  std::array<int64_t, 4> numbers{};
  unsigned char bytes[5] = {};
  std::vector<Half> halves(2);
  const std::string text = "abc";
  CHECK(ConstBuffer(floats).dtype() == Dtype::f32 && ConstBuffer(floats).count() == 3);
  CHECK(Buffer(numbers).dtype() == Dtype::i64 && Buffer(numbers).count() == 4);
  CHECK(Buffer(bytes).dtype() == Dtype::u8 && Buffer(bytes).count() == 5);
  CHECK(Buffer(halves).dtype() == Dtype::f16);
  CHECK(ConstBuffer(text).dtype() == Dtype::i8 && ConstBuffer(text).data() == text.data());
  CHECK(phalanx::DtypeOf<long>::value == phalanx::DtypeOf<long long>::value);
  CHECK(phalanx::DtypeOf<bool>::value == Dtype::boolean);
  CHECK(phalanx::DtypeOf<std::complex<float>>::value == Dtype::c64);
}

TEST(what_is_constant_is_no_output) {
  CHECK((std::is_constructible_v<Buffer, std::vector<float> &>));
  CHECK(!(std::is_constructible_v<Buffer, const std::vector<float> &>));
  CHECK((std::is_constructible_v<ConstBuffer, const std::vector<float> &>));
  CHECK(!(std::is_constructible_v<ConstBuffer, const std::vector<std::string> &>));
}

TEST(a_span_is_of_containers_arrays_and_parts_of_spans) {
  std::vector<int> numbers = {1, 2, 3, 4};
  const phalanx::span<int> all = numbers;
  const phalanx::span<const int> read = all;
  CHECK(read.size() == 4 && read[2] == 3 && read.subspan(1, 2).size() == 2);
  int sum = 0;
  for (const int each : read) sum += each;
  CHECK(sum == 10);
  CHECK(phalanx::span<int>().empty());
  CHECK(!(std::is_constructible_v<phalanx::span<int>, const std::vector<int> &>));
}

TEST(names_and_sizes_are_those_of_the_core) {
  CHECK(std::string(name_of(Dtype::bf16)) == "bfloat16" && size_of(Dtype::bf16) == 2);
  CHECK(std::string(name_of(phalanx::Op::sum)) == "sum");
  CHECK(!phalanx::version().empty() && phalanx::build_info()[0] == '{');
  CHECK(phalanx::has("cpu") && !phalanx::has("teleport"));
}

TEST(the_log_takes_a_function_and_lets_go_of_it) {
  const auto lines = std::make_shared<std::atomic<int>>(0);
  const auto count = [lines](phalanx::LogLevel, std::string_view, int32_t, std::string_view) { ++*lines; };
  phalanx::set_log(count, phalanx::LogLevel::debug);
  phalanx::set_log(count, phalanx::LogLevel::debug);  // the first copy goes
  hpp::as_threads(2, [](phalanx::World &world) { world.group("all").barrier(); });
  CHECK(lines.use_count() == 3);
  phalanx::set_log({});
  CHECK(lines.use_count() == 2);
}

TEST(the_interrupt_hook_takes_a_function) {
  hpp::as_threads(2, [](phalanx::World &world) {
    const auto group = world.group("all");
    if (world.rank() == 0) {
      const phalanx::InterruptHook hook([] { return true; });
      CHECK(hpp::thrown([&] { group.barrier(); }).status() == PHX_ERR_INTERRUPTED);
    } else {
      while (!group.error()) std::this_thread::yield();  // rank 0 waits until it is interrupted
      CHECK(hpp::thrown([&] { group.barrier(); }).status() == PHX_ERR_REVOKED);
    }
  });
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
