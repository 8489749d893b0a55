// phalanx.hpp: collectives on ordinary memory, complete or started.
#include <numeric>

#include "hpp.h"

using phalanx::Op;

namespace {

constexpr int kRanks = 3;

// Elements rank * 100 + i.
std::vector<int32_t> of(int rank, size_t count) {
  std::vector<int32_t> values(count);
  std::iota(values.begin(), values.end(), rank * 100);
  return values;
}

// Each collective with the numbers that it must give; `issue` makes it complete.
template <class Form, class Issue>
void exercise(const Form &form, int self, Issue issue) {
  std::vector<int32_t> in = of(self, 4), sum(4), all(12), part(4);
  issue(form.barrier());
  issue(form.all_reduce(in, sum));
  for (int i = 0; i < 4; ++i) CHECK(sum[static_cast<size_t>(i)] == 300 + 3 * i);
  issue(form.all_reduce(in, sum, Op::max));
  CHECK(sum[1] == 201);
  issue(form.all_gather(in, all));
  CHECK(all[0] == 0 && all[5] == 101 && all[11] == 203);
  issue(form.reduce_scatter(all, part, Op::sum));
  CHECK(part[1] == 3 * (self * 100 + 1));
  std::vector<int32_t> sent = of(self, 6), got(6);
  issue(form.all_to_all(sent, got));
  CHECK(got[0] == 2 * self && got[2] == 100 + 2 * self && got[5] == 201 + 2 * self);
  std::vector<int32_t> spread = of(self, 5);
  issue(form.broadcast(spread, 1));
  CHECK(spread[4] == 104);
  issue(form.reduce(in, self == 2 ? phalanx::Buffer(sum) : phalanx::Buffer(), 2));
  if (self == 2) CHECK(sum[3] == 309);
  issue(form.gather(in, self == 0 ? phalanx::Buffer(all) : phalanx::Buffer(), 0));
  if (self == 0) CHECK(all[11] == 203);
  std::vector<int32_t> dealt = of(7, 12);
  issue(form.scatter(self == 1 ? phalanx::ConstBuffer(dealt) : phalanx::ConstBuffer(), part, 1));
  CHECK(part[0] == 700 + 4 * self);
  const std::vector<size_t> counts = {1, 2, 3};
  std::vector<int32_t> own = of(self, static_cast<size_t>(self) + 1), ragged(6);
  issue(form.all_gather_v(own, ragged, counts));
  CHECK(ragged[0] == 0 && ragged[2] == 101 && ragged[5] == 202);
  std::vector<int32_t> mine(static_cast<size_t>(self) + 1);
  issue(form.reduce_scatter_v(ragged, mine, counts));
  CHECK(mine[0] == 3 * self * 100);
  const std::vector<size_t> one = {1, 1, 1};
  std::vector<int32_t> three = of(self, 3), back(3);
  issue(form.all_to_all_v(three, one, back, one));
  CHECK(back[2] == 200 + self);

  // The same on blocks that lie anywhere: three buffers, and the columns of a matrix of 2 x 7.
  std::vector<int32_t> a(4), b(4), c(4), matrix(14, -1);
  issue(form.all_gather_blocks(in, {a, b, c}));
  CHECK(a[3] == 3 && b[0] == 100 && c[2] == 202);
  phalanx::Blocks columns;
  for (size_t i = 0; i < 3; ++i) columns.add({&matrix[2 * i], 4, phalanx::Dtype::i32}, 2, 7);
  issue(form.all_gather_blocks(in, columns));
  CHECK(matrix[0] == 0 && matrix[3] == 101 && matrix[6] == -1 && matrix[7] == 2 && matrix[12] == 203 &&
        matrix[13] == -1);
  issue(form.reduce_scatter_blocks({a, b, c}, part));
  CHECK(part[1] == 3 * (self * 100 + 1));
  std::vector<int32_t> from0(1), from1(1), from2(1);
  issue(form.all_to_all_blocks(
      {phalanx::ConstBuffer(&in[0], 1, phalanx::Dtype::i32), phalanx::ConstBuffer(&in[2], 1, phalanx::Dtype::i32),
       phalanx::ConstBuffer(&in[3], 1, phalanx::Dtype::i32)},
      {from0, from1, from2}));
  const int given = self == 0 ? 0 : self + 1;  // which element everybody sent here
  CHECK(from0[0] == given && from1[0] == 100 + given && from2[0] == 200 + given);
  issue(form.gather_blocks(in, self == 2 ? phalanx::Blocks{c, b, a} : phalanx::Blocks(), 2));
  if (self == 2) CHECK(c[1] == 1 && b[1] == 101 && a[1] == 201);
  issue(form.scatter_blocks(self == 0 ? phalanx::ConstBlocks{a, b, c} : phalanx::ConstBlocks(), part, 0));
  CHECK(part[3] == self * 100 + 3);
}

}  // namespace

TEST(every_collective_gives_its_numbers_when_it_returns) {
  hpp::as_threads(kRanks, [](phalanx::World &world) {
    const auto group = world.group("all");
    // A call has no value: it is complete.
    std::vector<int32_t> in = of(world.rank(), 4), sum(4);
    group.all_reduce(in, sum);
    CHECK(sum[3] == 309);
    double scaled[2] = {1.0, 2.0};
    phalanx::Options options;
    options.scale = 0.5;
    group.all_reduce(scaled, scaled, Op::premul_sum, options);
    CHECK(scaled[1] == 3.0);
  });
}

TEST(every_collective_can_be_started_and_waited_for) {
  hpp::as_threads(kRanks, [](phalanx::World &world) {
    const auto group = world.group("all");
    exercise(group.start(), world.rank(), [](phalanx::Work work) { work.wait(); });
  });
}

TEST(work_that_is_dropped_is_waited_for) {
  hpp::as_threads(kRanks, [](phalanx::World &world) {
    const auto group = world.group("all");
    std::vector<int32_t> sum(100000, 1);
    {
      const auto work = group.start().all_reduce(sum, sum);
      static_cast<void>(work);
    }
    CHECK(sum[99999] == kRanks);
  });
}

TEST(the_first_of_several_works_can_be_waited_for) {
  hpp::as_threads(2, [](phalanx::World &world) {
    const auto group = world.group("all");
    int32_t never = 0, sum = 1;
    std::vector<phalanx::Work> works;
    works.push_back(group.start().recv(phalanx::Buffer(&never, 1, phalanx::Dtype::i32), 1 - world.rank(), 5));
    const phalanx::Buffer one(&sum, 1, phalanx::Dtype::i32);
    works.push_back(group.start().all_reduce(phalanx::ConstBuffer(&sum, 1, phalanx::Dtype::i32), one));
    CHECK(phalanx::Work::wait_any(works, phalanx::Milliseconds(20000)) == 1);
    CHECK(sum == 2 && works[1].test() && !works[0].error());
    CHECK(hpp::thrown([&] {
            phalanx::Work::wait_any({works.data(), 1}, phalanx::Milliseconds(10));
          }).status() == PHX_ERR_TIMEOUT);
    CHECK(!group.error());  // nothing is lost
    group.barrier();
    group.send(phalanx::ConstBuffer(&sum, 1, phalanx::Dtype::i32), 1 - world.rank(), 5);
    works[0].wait();
    CHECK(never == 2 && works[0].source() == 1 - world.rank());
  });
}

TEST(several_calls_go_as_one) {
  hpp::as_threads(kRanks, [](phalanx::World &world) {
    const auto group = world.group("all");
    std::vector<float> a(3, 1.0f), b(5, 2.0f), whole(9);
    phalanx::Calls calls;
    calls.all_reduce(a, a).all_reduce(b, b, Op::max);
    group.coalesced(calls);
    CHECK(a[2] == 3.0f && b[4] == 2.0f);
    group.coalesced(phalanx::Calls().all_gather(a, whole));
    CHECK(whole[8] == 3.0f);
  });
}

TEST(sizes_and_dtypes_that_do_not_fit_are_refused_on_all_ranks) {
  hpp::as_threads(2, [](phalanx::World &world) {
    const auto group = world.group("all");
    std::vector<float> three(3), four(4);
    std::vector<int> numbers(3);
    CHECK(hpp::says(hpp::thrown([&] { group.all_reduce(three, four); }), PHX_ERR_INVALID, "3 elements, the output 4"));
    CHECK(hpp::says(hpp::thrown([&] { group.all_reduce(three, numbers); }), PHX_ERR_INVALID, "float32"));
    group.all_reduce(three, three);  // ranks that refuse alike go on
    if (world.rank() == 0) {
      CHECK(hpp::thrown([&] { group.all_gather(three, three); }).status() == PHX_ERR_INVALID);
      while (!group.error()) std::this_thread::yield();  // rank 1 has heard of it
    } else {
      std::vector<float> six(6);
      CHECK(hpp::says(hpp::thrown([&] { group.all_gather(three, six); }), PHX_ERR_MISMATCH, "elements"));
    }
  });
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
