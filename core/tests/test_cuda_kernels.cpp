// The kernels for GPUs, run by threads of the host: they must give the bits of the host's own kernels.
#include <sys/mman.h>

#include <cstring>
#include <mutex>

#include "gpu/move.h"
#include "gpu/reduce.h"
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
  Ranks(int n, void *const *blocks, size_t bytes)
      : team_(n, kBlocks, kLines * n * sizeof(Line)), statuses_(n), epochs_(n, std::vector<uint32_t>(kLineBlocks)) {
    for (int rank = 0; rank < n; ++rank) {
      Launch launch{};
      launch.team = team_.of(rank, blocks, bytes);
      launch.in = blocks[rank];
      launch.divisor = n;
      launch.scale = 1;
      launch.item = 1;
      launch.timeout_ns = kPatient;
      launch.failed = &statuses_[rank];
      launch.lines = team_.space_at();
      launch.parts = launch.lines;  // no call takes both
      launch.epochs = epochs_[rank].data();
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
    run(kBlocks, kernel);
  }
  template <class Kernel>
  void run(uint32_t blocks, const Kernel &kernel) {
    host_blocks::run(everyone, blocks, kThreads, [&](int rank) { kernel(launches[rank]); });
    for (const uint32_t status : statuses_) CHECK(status == 0);
  }
  host_blocks::Team &team() { return team_; }
  int32_t status(int rank) const { return static_cast<int32_t>(statuses_[rank]); }
  void forgive() { std::fill(statuses_.begin(), statuses_.end(), 0); }
  // So many launches by the LL protocol have been before, as far as the ranks know.
  void begin_at(uint32_t epoch) {
    for (std::vector<uint32_t> &epochs : epochs_) std::fill(epochs.begin(), epochs.end(), epoch);
  }

  std::vector<Launch> launches;
  std::vector<int> everyone;

 private:
  static constexpr size_t kLines = size_t{2} * kLineBlocks * kLineThreads;
  host_blocks::Team team_;
  std::vector<uint32_t> statuses_;
  std::vector<std::vector<uint32_t>> epochs_;
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
    const size_t bytes = count * sizeof(typename phx::kernels::Element<E>::Raw);
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
    Ranks ranks(n, writable(in), count * sizeof(typename phx::kernels::Element<E>::Raw));
    prepare(ranks, count, divisor, scale);
    ranks.run([](const Launch &launch) { reduce_in_place<E, Op>(launch); });
  }
};

// In place, as many times as it takes for what was sent first to be overwritten. A thread does 8 bytes.
struct Lines {
  template <class E, class Op>
  static void run(void *out, const void *const *in, int n, size_t count, int64_t divisor, double scale) {
    using Raw = typename phx::kernels::Element<E>::Raw;
    if constexpr (sizeof(Raw) <= sizeof(uint64_t)) {
      Ranks ranks(n, writable(in), count * sizeof(Raw));
      prepare(ranks, count, divisor, scale);
      std::vector<Bytes> others(n, Bytes(count * sizeof(Raw) + 1));
      const uint32_t blocks = static_cast<uint32_t>(count * sizeof(Raw) / (kThreads * sizeof(uint64_t)) + 1);
      for (int turn = 0; turn < 3; ++turn) {
        for (int rank = 0; rank < n; ++rank) ranks.launches[rank].out = rank == 0 ? out : others[rank].data();
        ranks.run(blocks, [](const Launch &launch) { reduce_lines<E, Op>(launch); });
        for (int rank = 1; rank < n; ++rank) CHECK(std::memcmp(others[rank].data(), out, count * sizeof(Raw)) == 0);
      }
    }
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
                 two_shot = phx::kernels::select<TwoShot>(dtype, op), lines = phx::kernels::select<Lines>(dtype, op);
  if (wanted.size() <= kLineBlocks * kThreads * sizeof(uint64_t) && (dtype != PHX_DTYPE_C128 || op != PHX_OP_PROD))
    expect(call(lines, in, wanted.size(), count, n, kScale, shift, -1), wanted, "lines", dtype, op, in.size(), "");
  expect(call(one_shot, in, wanted.size(), count, n, kScale, shift, -1), wanted, "one-shot", dtype, op, in.size(), "");
  Placed placed(in, wanted.size(), shift);
  two_shot(nullptr, placed.pointers(), n, count, n, kScale);
  for (size_t k = 0; k < in.size(); ++k) expect(placed.content(k), wanted, "two-shot", dtype, op, in.size(), "");
}

}  // namespace

TEST(every_pair_gives_the_bits_of_the_host) {
  std::mt19937_64 random(41);
  for_pairs_of_gpus([&](int32_t dtype, int32_t op) {
    for (const size_t shift : {size_t{0}, size_t{8}}) expect_both(inputs(random, dtype, 2, 133), 133, dtype, op, shift);
  });
}

TEST(any_number_of_elements_and_ranks) {
  std::mt19937_64 random(42);
  for (const int n : {1, 3, 4})
    for (const int32_t dtype : {PHX_DTYPE_BF16, PHX_DTYPE_F32, PHX_DTYPE_F64, PHX_DTYPE_U8})
      for (const size_t count : {size_t{0}, size_t{1}, 16 / phx_dtype_size(dtype), size_t{65}, size_t{1000}})
        expect_both(inputs(random, dtype, n, count), count, dtype, PHX_OP_SUM, 0);
}

TEST(a_part_of_the_input_is_reduced_and_scattered) {
  std::mt19937_64 random(43);
  const int n = 3;
  const size_t count = 77;
  const std::vector<Bytes> in = inputs(random, PHX_DTYPE_BF16, n, n * count);
  const Bytes wanted = reference(in, n * count, PHX_DTYPE_BF16, PHX_OP_AVG, n, 1);
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
      const std::vector<Bytes> in = inputs(random, PHX_DTYPE_U8, n, n * count);
      Placed placed(in, n * count, 0);
      Ranks ranks(n, writable(placed.pointers()), n * count);
      prepare(ranks, count, 1, 1);
      std::vector<Bytes> out(n, Bytes(n * count));
      for (int rank = 0; rank < n; ++rank) ranks.launches[rank].out = out[rank].data();
      ranks.run([](const Launch &launch) { all_gather(launch); });
      for (int rank = 0; rank < n; ++rank)
        for (int from = 0; from < n; ++from)
          CHECK(std::memcmp(out[rank].data() + from * count, in[from].data(), count) == 0);
      ranks.run([](const Launch &launch) { all_to_all(launch); });
      for (int rank = 0; rank < n; ++rank)
        for (int from = 0; from < n; ++from)
          CHECK(std::memcmp(out[rank].data() + from * count, in[from].data() + rank * count, count) == 0);
      for (Launch &launch : ranks.launches) launch.root = n - 1;
      ranks.run([](const Launch &launch) { broadcast(launch); });
      for (int rank = 0; rank < n; ++rank) {
        const Bytes content = placed.content(rank);
        CHECK(std::memcmp(content.data(), in[n - 1].data(), count) == 0);
        CHECK(std::memcmp(content.data() + count, in[rank].data() + count, (n - 1) * count) == 0);
      }
    }
}

TEST(a_root_gathers_sums_and_scatters) {
  std::mt19937_64 random(46);
  const int n = 3, root = 1;
  const size_t count = 77;
  const std::vector<Bytes> in = inputs(random, PHX_DTYPE_U8, n, n * count);
  Placed placed(in, n * count, 0);
  Ranks ranks(n, writable(placed.pointers()), n * count);
  prepare(ranks, count, n, 1);
  Bytes out(n * count);
  for (Launch &launch : ranks.launches) launch.root = root;
  ranks.launches[root].out = out.data();  // the others have none
  ranks.run([](const Launch &launch) { all_gather(launch); });
  for (int from = 0; from < n; ++from) CHECK(std::memcmp(out.data() + from * count, in[from].data(), count) == 0);
  ranks.run([](const Launch &launch) { reduce_into_out<uint8_t, phx::kernels::Sum>(launch); });
  const Bytes wanted = reference(in, count, PHX_DTYPE_U8, PHX_OP_SUM, n, 1);
  CHECK(std::memcmp(out.data(), wanted.data(), count) == 0);
  std::vector<Bytes> parts(n, Bytes(count));
  for (int rank = 0; rank < n; ++rank) ranks.launches[rank].out = parts[rank].data();
  ranks.run([](const Launch &launch) { scatter(launch); });
  for (int rank = 0; rank < n; ++rank)
    CHECK(std::memcmp(parts[rank].data(), in[root].data() + rank * count, count) == 0);
}

TEST(lists_of_counts_are_followed) {
  std::mt19937_64 random(47);
  const int n = 3;
  const size_t item = 2;
  const std::vector<Bytes> in = inputs(random, PHX_DTYPE_BF16, n, 300);
  Placed placed(in, 600, 0);
  Ranks ranks(n, writable(placed.pointers()), 600);
  const auto count_of = [](int from, int to) { return static_cast<size_t>((from * 3 + to * 5) % 7) * 9; };
  std::vector<Bytes> out(n, Bytes(600));
  std::vector<Lists> lists(n);
  for (int rank = 0; rank < n; ++rank) {
    ranks.launches[rank].out = out[rank].data();
    ranks.launches[rank].item = item;
    for (int k = 0; k < n; ++k) lists[rank].out[k] = count_of(k, 0);
  }
  ranks.run([&](const Launch &launch) { all_gather_v(launch, lists[launch.team.group_rank]); });
  for (int rank = 0; rank < n; ++rank) {
    size_t at = 0;
    for (int from = 0; from < n; at += count_of(from, 0) * item, ++from)
      CHECK(std::memcmp(out[rank].data() + at, in[from].data(), count_of(from, 0) * item) == 0);
  }
  for (int rank = 0; rank < n; ++rank)
    for (int k = 0; k < n; ++k) {
      lists[rank].in[k] = count_of(rank, k);
      lists[rank].out[k] = count_of(k, rank);
    }
  const auto exchange = [&](const Launch &launch) { all_to_all_v(launch, lists[launch.team.group_rank]); };
  ranks.run(exchange);
  for (int rank = 0; rank < n; ++rank) {
    size_t at = 0;
    for (int from = 0; from < n; at += count_of(from, rank) * item, ++from) {
      size_t start = 0;
      for (int to = 0; to < rank; ++to) start += count_of(from, to) * item;
      CHECK(std::memcmp(out[rank].data() + at, in[from].data() + start, count_of(from, rank) * item) == 0);
    }
  }
  ++lists[0].in[2];  // rank 2 does not expect it; all come to an end
  ranks.run(ranks.everyone, exchange);
  CHECK(ranks.status(0) == 0 && ranks.status(1) == 0 && ranks.status(2) == report(Report::kDisagrees, n, 0));
}

TEST(a_rank_that_is_missing_or_has_failed_ends_the_others) {
  std::mt19937_64 random(45);
  for (const bool fails : {false, true}) {
    const std::vector<Bytes> in = inputs(random, PHX_DTYPE_F32, 3, 100);
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
    Bytes out(40, 9);
    prepare(ranks, 10, 1, 1);
    for (Launch &launch : ranks.launches) launch.out = out.data();
    ranks.run({0, 1}, [](const Launch &launch) { reduce_lines<float, phx::kernels::Sum>(launch); });
    for (const int rank : {0, 1}) CHECK(ranks.status(rank) == (fails ? PHX_ERR_REVOKED : 1 + 2));
    CHECK(out == Bytes(40, 9));
  }
}

// A Line that is not of this launch must not count: not one that was never written, whatever the epoch, nor one of a
// launch 2^32 before.
TEST(lines_that_were_not_sent_are_waited_for) {
  std::mt19937_64 random(46);
  const std::vector<Bytes> in = inputs(random, PHX_DTYPE_U32, 2, kThreads * 2);
  Placed placed(in, kThreads * 2 * sizeof(uint32_t), 0);
  Ranks ranks(2, writable(placed.pointers()), kThreads * 2 * sizeof(uint32_t));
  std::vector<uint32_t> out(kThreads * 2), others(kThreads * 2);
  ranks.launches[0].out = out.data();
  ranks.launches[1].out = others.data();
  const auto sum = [](const Launch &launch) { reduce_lines<uint32_t, phx::kernels::Sum>(launch); };
  const auto expect = [&](size_t count) {
    prepare(ranks, count, 1, 1);
    ranks.run(1, sum);
    for (size_t i = 0; i < count; ++i) {
      uint32_t a, b;
      std::memcpy(&a, in[0].data() + i * sizeof a, sizeof a);
      std::memcpy(&b, in[1].data() + i * sizeof b, sizeof b);
      CHECK(out[i] == a + b && others[i] == a + b);
    }
  };
  const auto expect_alone = [&] {
    prepare(ranks, kThreads * 2, 1, 1);
    for (Launch &launch : ranks.launches) launch.timeout_ns = 20 * 1000 * 1000;
    out.assign(out.size(), 7);
    ranks.run(std::vector<int>{0}, sum);
    CHECK(ranks.status(0) == 1 + 1);  // rank 1 has sent nothing
    for (const uint32_t value : out) CHECK(value == 7);
    ranks.forgive();
    for (Launch &launch : ranks.launches) launch.timeout_ns = kPatient;
  };
  for (const uint32_t last : {UINT32_MAX, UINT32_MAX - 1, UINT32_MAX / 2, 0u}) {
    ranks.begin_at(last);
    expect_alone();
  }
  for (const uint32_t last : {UINT32_MAX - 2, UINT32_MAX / 2 - 1, 65533u}) {
    ranks.begin_at(last);
    for (int turn = 0; turn < 6; ++turn) expect(2 + static_cast<size_t>(turn % 3) * 4);
  }
  ranks.begin_at(6);
  expect(kThreads * 2);  // epoch 7, of all threads
  ranks.begin_at(65535);
  for (int turn = 0; turn < 2; ++turn) expect(2);  // of the first one; from time to time the others send as well
  ranks.begin_at(6);
  expect_alone();  // 2^32 launches later
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
