// The kernels for GPUs, run by threads of the host: they must give the bits of the host's own kernels.
#include <sys/mman.h>

#include <cstring>
#include <mutex>

#include "cuda/collectives.h"
#include "host_blocks.h"
#include "kernel_reference.h"

using namespace kernel_test;
using namespace phx::cuda;
using phx::kernels::ReduceFn;

namespace {

constexpr uint32_t kBlocks = 2, kThreads = 5;
constexpr uint64_t kPatient = 60ull * 1000 * 1000 * 1000;

// The blocks of n ranks, what goes on between them, and one launch on each.
class Ranks {
 public:
  Ranks(int n, void *const *blocks, size_t bytes) : team_(n, kBlocks), statuses_(n) {
    for (int rank = 0; rank < n; ++rank) {
      Launch launch{};
      launch.team = team_.of(rank, blocks, bytes);
      launch.divisor = n;
      launch.scale = 1;
      launch.timeout_ns = kPatient;
      launch.failed = &statuses_[rank];
      launches.push_back(launch);
      everyone.push_back(rank);
    }
  }
  template <class Kernel>
  void run(const std::vector<int> &ranks, const Kernel &kernel) {
    host_blocks::run(ranks, kBlocks, kThreads, [&](int rank) { kernel(launches[rank]); });
  }
  template <class Kernel>
  void run(const Kernel &kernel) {
    run(everyone, kernel);
    for (const uint32_t status : statuses_) CHECK(status == 0);
  }
  host_blocks::Team &team() { return team_; }
  int32_t status(int rank) const { return static_cast<int32_t>(statuses_[rank]); }

  std::vector<Launch> launches;
  std::vector<int> everyone;

 private:
  host_blocks::Team team_;
  std::vector<uint32_t> statuses_;
};

// As kernels of the host, so that the tests of these can be used: rank k's block is input k.
void prepare(Ranks &ranks, size_t count, int64_t divisor, double scale) {
  for (Launch &launch : ranks.launches) {
    launch.count = count;
    launch.divisor = divisor;
    launch.scale = scale;
  }
}
void *const *writable(const void *const *in) {
  return const_cast<void *const *>(reinterpret_cast<const void *const *>(in));
}

struct OneShot {
  template <class E, class Op>
  static void run(void *out, const void *const *in, int n, size_t count, int64_t divisor, double scale) {
    const size_t bytes = count * sizeof(typename Several<E>::Raw);
    Ranks ranks(n, writable(in), bytes);
    prepare(ranks, count, divisor, scale);
    std::vector<Bytes> others(n, Bytes(bytes + 1));
    for (int rank = 0; rank < n; ++rank) ranks.launches[rank].out = rank == 0 ? out : others[rank].data();
    ranks.run([](const Launch &launch) { reduce_into_out<E, Op>(launch); });
    for (int rank = 1; rank < n; ++rank) CHECK(std::memcmp(others[rank].data(), out, bytes) == 0);
  }
};

struct TwoShot {
  template <class E, class Op>
  static void run(void *, const void *const *in, int n, size_t count, int64_t divisor, double scale) {
    Ranks ranks(n, writable(in), count * sizeof(typename Several<E>::Raw));
    prepare(ranks, count, divisor, scale);
    ranks.run([](const Launch &launch) { reduce_in_place<E, Op>(launch); });
  }
};

std::vector<Bytes> inputs(std::mt19937_64 &random, int32_t dtype, int n, size_t count) {
  std::vector<Bytes> in;
  for (int k = 0; k < n; ++k) in.push_back(random_elements(random, dtype, count));
  return in;
}

void expect_both(const std::vector<Bytes> &in, size_t count, int32_t dtype, int32_t op, size_t shift) {
  const int n = static_cast<int>(in.size());
  const Bytes wanted = reference(in, count, dtype, op, n, kScale);
  const ReduceFn one_shot = phx::kernels::select<OneShot>(dtype, op),
                 two_shot = phx::kernels::select<TwoShot>(dtype, op);
  expect(call(one_shot, in, wanted.size(), count, n, kScale, shift, -1), wanted, "one-shot", dtype, op, in.size(), "");
  Placed placed(in, wanted.size(), shift);
  two_shot(nullptr, placed.pointers(), n, count, n, kScale);
  for (size_t k = 0; k < in.size(); ++k) expect(placed.content(k), wanted, "two-shot", dtype, op, in.size(), "");
}

}  // namespace

TEST(every_pair_gives_the_bits_of_the_host) {
  std::mt19937_64 random(41);
  for_each_pair([&](int32_t dtype, int32_t op) {
    for (const size_t shift : {size_t{0}, size_t{8}}) expect_both(inputs(random, dtype, 2, 133), 133, dtype, op, shift);
  });
}

TEST(any_number_of_elements_and_ranks) {
  std::mt19937_64 random(42);
  for (const int n : {1, 3, 4})
    for (const int32_t dtype : {PHX_BF16, PHX_F32, PHX_F64, PHX_U8})
      for (const size_t count : {size_t{0}, size_t{1}, 16 / phx_dtype_size(dtype), size_t{65}, size_t{1000}})
        expect_both(inputs(random, dtype, n, count), count, dtype, PHX_SUM, 0);
}

TEST(a_part_of_the_input_is_reduced_and_scattered) {
  std::mt19937_64 random(43);
  const int n = 3;
  const size_t count = 77;
  const std::vector<Bytes> in = inputs(random, PHX_BF16, n, n * count);
  const Bytes wanted = reference(in, n * count, PHX_BF16, PHX_AVG, n, 1);
  Placed placed(in, wanted.size(), 0);
  Ranks ranks(n, writable(placed.pointers()), wanted.size());
  prepare(ranks, count, n, 1);
  std::vector<Bytes> out(n, Bytes(count * 2));
  for (int rank = 0; rank < n; ++rank) ranks.launches[rank].out = out[rank].data();
  for (int rank = 0; rank < n; ++rank) ranks.launches[rank].begin = rank * count;
  ranks.run([](const Launch &launch) { reduce_into_out<phx::kernels::BF16, phx::kernels::Average>(launch); });
  for (int rank = 0; rank < n; ++rank)
    CHECK(std::memcmp(out[rank].data(), wanted.data() + rank * count * 2, count * 2) == 0);
}

TEST(blocks_are_gathered_exchanged_and_broadcast) {
  std::mt19937_64 random(44);
  for (const int n : {1, 2, 3})
    for (const size_t count : {size_t{1}, size_t{64}, size_t{301}}) {
      const std::vector<Bytes> in = inputs(random, PHX_U8, n, n * count);
      Placed placed(in, n * count, 0);
      Ranks ranks(n, writable(placed.pointers()), n * count);
      prepare(ranks, count, 1, 1);
      std::vector<Bytes> out(n, Bytes(n * count));
      for (int rank = 0; rank < n; ++rank) ranks.launches[rank].out = out[rank].data();
      ranks.run([](const Launch &launch) { all_gather(launch, 1); });
      for (int rank = 0; rank < n; ++rank)
        for (int from = 0; from < n; ++from)
          CHECK(std::memcmp(out[rank].data() + from * count, in[from].data(), count) == 0);
      ranks.run([](const Launch &launch) { all_to_all(launch, 1); });
      for (int rank = 0; rank < n; ++rank)
        for (int from = 0; from < n; ++from)
          CHECK(std::memcmp(out[rank].data() + from * count, in[from].data() + rank * count, count) == 0);
      for (Launch &launch : ranks.launches) launch.root = n - 1;
      ranks.run([](const Launch &launch) { broadcast(launch, 1); });
      for (int rank = 0; rank < n; ++rank) {
        const Bytes content = placed.content(rank);
        CHECK(std::memcmp(content.data(), in[n - 1].data(), count) == 0);
        CHECK(std::memcmp(content.data() + count, in[rank].data() + count, (n - 1) * count) == 0);
      }
    }
}

TEST(a_rank_that_is_missing_or_has_failed_ends_the_others) {
  std::mt19937_64 random(45);
  for (const bool fails : {false, true}) {
    const std::vector<Bytes> in = inputs(random, PHX_F32, 3, 100);
    Placed placed(in, 400, 0);
    Ranks ranks(3, writable(placed.pointers()), 400);
    prepare(ranks, 100, 1, 1);
    if (fails) ranks.team().fail(2);
    for (Launch &launch : ranks.launches) launch.timeout_ns = fails ? kPatient : 20 * 1000 * 1000;
    ranks.run({0, 1}, [](const Launch &launch) { reduce_in_place<float, phx::kernels::Sum>(launch); });
    for (const int rank : {0, 1}) {
      CHECK(ranks.status(rank) == (fails ? PHX_ERR_REVOKED : 1 + 2));
      CHECK(placed.content(rank) == in[rank]);  // nothing was summed without it
    }
  }
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
