// Collectives on memory of GPUs, launched by the library: on the driver of the host, or on the one of fake_cuda/ (CTest
// gives that one).
#include <atomic>
#include <csignal>
#include <cstring>
#include <random>
#include <thread>

#include "gpu_stream.h"
#include "kernel_reference.h"
#include "ranks.h"

using gpu::Gpu;
using gpu::kGpu;
using kernel_test::Bytes;
using kernel_test::for_pairs_of_gpus;
using kernel_test::kScale;
using kernel_test::random_elements;
using kernel_test::reference;

namespace {

// A stream of a rank's own, and calls on it.
class OwnStream : public gpu::OwnStream {
 public:
  gpu::Options options(int64_t timeout_ms = 20000) const {
    gpu::Options options;
    options.timeout_ms = timeout_ms;
    options.scale = kScale;
    options.stream = get();
    return options;
  }
};

// A rank with a block of symmetric memory, memory for a result, and a stream.
class Rank {
 public:
  Rank(phx_world *world, size_t bytes) : world_(world), group_(ranks::make_group(world)), bytes_(bytes) {
    CHECK_OK(phx_mem_alloc(world, &kGpu, bytes, &block_));
    CHECK_OK(phx_mem_alloc(world, &kGpu, bytes, &out_));
    CHECK_OK(phx_symm_rendezvous(group_, block_, 0, &symm_));
  }
  ~Rank() {
    phx_symm_release(symm_);
    phx_mem_free(world_, out_);
    phx_mem_free(world_, block_);
    phx_group_release(group_);
  }
  Rank(const Rank &) = delete;
  Rank &operator=(const Rank &) = delete;

  phx_group *group() const { return group_; }
  phx_symm *symm() const { return symm_; }
  char *block() const { return static_cast<char *>(block_); }
  void *out() const { return out_; }
  const OwnStream &stream() const { return stream_; }

  void write(const Bytes &bytes) const { Gpu().write(block_, bytes); }
  // After what is on the stream.
  Bytes content() const {
    stream_.wait();
    return Gpu().read(block_, bytes_);
  }
  Bytes result(size_t bytes) const {
    stream_.wait();
    return Gpu().read(out_, bytes);
  }

 private:
  phx_world *const world_;
  phx_group *const group_;
  const size_t bytes_;
  void *block_ = nullptr, *out_ = nullptr;
  phx_symm *symm_ = nullptr;
  OwnStream stream_;
};

// The same on all ranks.
std::vector<Bytes> inputs(int seed, int32_t dtype, int n, size_t count) {
  std::mt19937_64 random(seed);
  std::vector<Bytes> in;
  for (int k = 0; k < n; ++k) in.push_back(random_elements(random, dtype, count));
  return in;
}

constexpr size_t kSpace = 1 << 16;

Bytes part(const Bytes &bytes, size_t begin, size_t size) {
  return {bytes.begin() + static_cast<std::ptrdiff_t>(begin),
          bytes.begin() + static_cast<std::ptrdiff_t>(begin + size)};
}

#ifdef PHX_SANITIZED
constexpr size_t kCounts[] = {133};  // for races and bounds
#else
constexpr size_t kCounts[] = {1, 133, 800};
#endif

void each_collective(int rank, phx_world *world) {
  const int n = phx_world_size(world);
  const Rank me(world, kSpace);
  const gpu::Options options = me.stream().options();
  int seed = 50;
  for (const int32_t dtype :
       {PHX_DTYPE_F32, PHX_DTYPE_BF16, PHX_DTYPE_I32, PHX_DTYPE_BOOL, PHX_DTYPE_C64, PHX_DTYPE_F8E4M3, PHX_DTYPE_I8})
    for (const size_t count : kCounts) {
      const size_t item = phx_dtype_size(dtype), bytes = count * item, offset = 16 * item;
      const std::vector<Bytes> in = inputs(++seed, dtype, n, n * count);
      const Bytes summed = reference(in, n * count, dtype, PHX_OP_SUM, n, 1);
      Bytes block(kSpace, 0);
      std::memcpy(block.data() + offset, in[rank].data(), in[rank].size());
      me.write(block);
      CHECK_OK(phx_symm_all_reduce(me.symm(), offset, me.out(), count, dtype, PHX_OP_SUM, &options, nullptr));
      CHECK(me.result(bytes) == part(summed, 0, bytes));
      CHECK_OK(phx_symm_reduce_scatter(me.symm(), offset, me.out(), count, dtype, PHX_OP_SUM, &options, nullptr));
      CHECK(me.result(bytes) == part(summed, rank * bytes, bytes));
      CHECK_OK(phx_symm_all_gather(me.symm(), offset, me.out(), count, dtype, &options, nullptr));
      for (int k = 0; k < n; ++k) CHECK(part(me.result(n * bytes), k * bytes, bytes) == part(in[k], 0, bytes));
      CHECK_OK(phx_symm_all_to_all(me.symm(), offset, me.out(), count, dtype, &options, nullptr));
      for (int k = 0; k < n; ++k)
        CHECK(part(me.result(n * bytes), k * bytes, bytes) == part(in[k], rank * bytes, bytes));
      const int root = n - 1;
      CHECK_OK(phx_symm_reduce(me.symm(), offset, rank == root ? me.out() : nullptr, count, dtype, PHX_OP_SUM, root,
                               &options, nullptr));
      if (rank == root) CHECK(me.result(bytes) == part(summed, 0, bytes));
      CHECK_OK(phx_symm_gather(me.symm(), offset, rank == 0 ? me.out() : nullptr, count, dtype, 0, &options, nullptr));
      if (rank == 0)
        for (int k = 0; k < n; ++k) CHECK(part(me.result(n * bytes), k * bytes, bytes) == part(in[k], 0, bytes));
      CHECK_OK(phx_symm_scatter(me.symm(), offset, me.out(), count, dtype, root, &options, nullptr));
      CHECK(me.result(bytes) == part(in[root], rank * bytes, bytes));
      // In place, one after the other on the stream: no rank waits in between.
      CHECK_OK(
          phx_symm_all_reduce(me.symm(), offset, me.block() + offset, count, dtype, PHX_OP_SUM, &options, nullptr));
      CHECK_OK(phx_symm_broadcast(me.symm(), offset + bytes, (n - 1) * count, dtype, n - 1, &options, nullptr));
      std::memcpy(block.data() + offset, summed.data(), bytes);
      std::memcpy(block.data() + offset + bytes, in[n - 1].data() + bytes, (n - 1) * bytes);
      CHECK(me.content() == block);
      CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
    }
}

// How many elements go from rank i to rank j, or come from rank i.
size_t count_of(int i, int j) { return static_cast<size_t>((i * 3 + j * 5) % 7) * 30; }

void each_with_lists(int rank, phx_world *world) {
  const int n = phx_world_size(world);
  const Rank me(world, kSpace);
  const gpu::Options options = me.stream().options();
  const size_t item = phx_dtype_size(PHX_DTYPE_BF16), offset = 6 * item;
  const std::vector<Bytes> in = inputs(20, PHX_DTYPE_BF16, n, 2000);
  Bytes block(kSpace, 0);
  std::memcpy(block.data() + offset, in[rank].data(), in[rank].size());
  me.write(block);
  std::vector<size_t> counts, sent, received;
  for (int k = 0; k < n; ++k) {
    counts.push_back(count_of(k, 1));
    sent.push_back(count_of(rank, k));
    received.push_back(count_of(k, rank));
  }
  Bytes gathered, exchanged;
  size_t total = 0, begin = 0;
  for (int k = 0; k < n; ++k) {
    gathered.insert(gathered.end(), in[k].begin(), in[k].begin() + static_cast<std::ptrdiff_t>(counts[k] * item));
    size_t start = 0;
    for (int to = 0; to < rank; ++to) start += count_of(k, to) * item;
    const Bytes piece = part(in[k], start, received[k] * item);
    exchanged.insert(exchanged.end(), piece.begin(), piece.end());
    if (k < rank) begin += counts[k];
    total += counts[k];
  }
  const Bytes summed = reference(in, total, PHX_DTYPE_BF16, PHX_OP_SUM, n, 1);
  CHECK_OK(phx_symm_all_gather_v(me.symm(), offset, me.out(), counts.data(), PHX_DTYPE_BF16, &options, nullptr));
  CHECK(me.result(gathered.size()) == gathered);
  CHECK_OK(phx_symm_reduce_scatter_v(me.symm(), offset, me.out(), counts.data(), PHX_DTYPE_BF16, PHX_OP_SUM, &options,
                                     nullptr));
  CHECK(me.result(counts[rank] * item) == part(summed, begin * item, counts[rank] * item));
  for (int turn = 0; turn < 2; ++turn) {
    CHECK_OK(phx_symm_all_to_all_v(me.symm(), offset, sent.data(), me.out(), received.data(), PHX_DTYPE_BF16, &options,
                                   nullptr));
    CHECK(me.result(exchanged.size()) == exchanged);
  }
  CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
}

}  // namespace

// First: a forked child must find a driver that was not started.
TEST(a_kernel_ends_when_a_rank_dies) {
  if (gpu::symbol<int()>("cuInit") == nullptr) check::skip("libcuda.so.1");
  const std::vector<int> codes = ranks::as_processes(2, [](int rank, phx_world *world) {
    const Rank me(world, kSpace);
    CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
    if (rank == 1) raise(SIGKILL);
    const gpu::Options options = me.stream().options(60000);
    // It may be dead already.
    const phx_status status =
        phx_symm_all_reduce(me.symm(), 0, me.out(), 100, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr);
    CHECK(status == PHX_OK || status == PHX_ERR_PEER_DEAD);
    me.stream().wait();  // the test's own limit is less than the timeout
    phx_error_info info{};
    info.struct_size = sizeof info;
    while (phx_group_get_error(me.group(), &info) == PHX_ERR_NOT_FOUND) std::this_thread::yield();
    CHECK(info.status == PHX_ERR_PEER_DEAD && info.peer == 1);
    Gpu().write(me.block(), Bytes(100, 3));  // the GPU can be used
    CHECK(Gpu().read(me.block(), 100) == Bytes(100, 3));
  });
  CHECK(codes[0] == 0 && WIFSIGNALED(codes[1]));
}

TEST(ranks_as_processes_get_the_bits_of_the_host) {
  if (gpu::symbol<int()>("cuInit") == nullptr) check::skip("libcuda.so.1");
  ranks::all_zero(ranks::as_processes(3, each_collective));
}

TEST(one_rank_alone_gets_the_bits_of_the_host) {
  gpu::needs_driver();
  ranks::as_threads(1, each_collective);
}

TEST(ranks_as_threads_get_the_bits_of_the_host) {
  gpu::needs_driver();
  ranks::as_threads(2, each_collective);
}

TEST(every_pair_of_dtype_and_op_has_its_kernel) {
  gpu::needs_driver();
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const Rank me(world, kSpace);
    const gpu::Options options = me.stream().options();
    int seed = 100;
    for_pairs_of_gpus([&](int32_t dtype, int32_t op) {
      const size_t count = 21, bytes = count * phx_dtype_size(dtype);
      const std::vector<Bytes> in = inputs(++seed, dtype, 2, count);
      const Bytes wanted = reference(in, count, dtype, op, 2, op == PHX_OP_PREMUL_SUM ? kScale : 1);
      me.write(in[rank]);
      CHECK_OK(phx_symm_all_reduce(me.symm(), 0, me.out(), count, dtype, op, &options, nullptr));
      CHECK_OK(phx_symm_all_reduce(me.symm(), 0, me.block(), count, dtype, op, &options, nullptr));
      CHECK(me.result(bytes) == wanted);
      CHECK(part(me.content(), 0, bytes) == wanted);
      CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
    });
  });
}

TEST(a_call_returns_before_the_others_have_come) {
  gpu::needs_driver();
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const Rank me(world, kSpace);
    const gpu::Options options = me.stream().options();
    const std::vector<Bytes> in = inputs(7, PHX_DTYPE_F32, 2, 100);
    me.write(in[rank]);
    if (rank == 1) CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
    CHECK_OK(phx_symm_all_reduce(me.symm(), 0, me.out(), 100, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
    if (rank == 0) CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));  // only now rank 1 goes on
    CHECK(me.result(400) == reference(in, 100, PHX_DTYPE_F32, PHX_OP_SUM, 2, 1));
  });
}

// To load a kernel may wait for all kernels of the process, so they are all loaded before one can wait for a rank.
TEST(a_kernel_that_waits_for_a_rank_keeps_no_other_kernel_from_being_launched) {
  gpu::needs_driver();
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const Rank me(world, kSpace);
    const OwnStream other;
    const gpu::Options options = me.stream().options();
    const std::vector<Bytes> in = inputs(8, PHX_DTYPE_F32, 2, 100);
    me.write(in[rank]);
    if (rank == 1) {
      CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
      CHECK_OK(phx_symm_enqueue_put_signal(me.symm(), 0, 2, other.get()));  // the first launch of its kernel
      other.wait();
    }
    CHECK_OK(phx_symm_all_reduce(me.symm(), 0, me.out(), 100, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
    if (rank == 0) CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));  // only now rank 1 goes on
    CHECK(me.result(400) == reference(in, 100, PHX_DTYPE_F32, PHX_OP_SUM, 2, 1));
  });
}

// F3: the rank that is late is named, and what was at hand can be used again.
TEST(a_kernel_ends_when_a_rank_does_not_come) {
  gpu::needs_driver();
  ranks::as_threads(2, [](int rank, phx_world *world) {
    {
      const Rank me(world, kSpace);
      const gpu::Options options = me.stream().options(50);
      if (rank == 0) {
        CHECK_OK(phx_symm_all_reduce(me.symm(), 0, me.out(), 100, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
        me.stream().wait();
        CHECK_FAILS(PHX_ERR_TIMEOUT, "timed out (the timeout of its launch) waiting for rank 1",
                    phx_symm_all_reduce(me.symm(), 0, me.out(), 100, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
        phx_error_info info{};
        info.struct_size = sizeof info;
        CHECK_OK(phx_group_get_error(me.group(), &info));
        CHECK(info.status == PHX_ERR_TIMEOUT && info.peer == 1);
      } else {  // it hears of it
        phx_error_info info{};
        info.struct_size = sizeof info;
        while (phx_group_get_error(me.group(), &info) == PHX_ERR_NOT_FOUND) std::this_thread::yield();
        CHECK(info.status == PHX_ERR_TIMEOUT && info.peer == 1);
      }
    }
    phx_group *again = ranks::make_group(world, "again");
    CHECK_OK(phx_barrier(again, nullptr, nullptr));
    phx_group_release(again);
    each_collective(rank, world);
  });
}

TEST(lists_of_counts_are_followed) {
  gpu::needs_driver();
  for (const int n : {1, 2, 3}) ranks::as_threads(n, each_with_lists);
}

// The lists of all_to_all_v are each rank's own: who expects something else finds out when it runs.
TEST(counts_that_differ_are_found_out_by_who_expects_others) {
  gpu::needs_driver();
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const Rank me(world, kSpace);
    const gpu::Options options = me.stream().options();
    const size_t sent[2] = {10, rank == 0 ? 21 : size_t{20}}, received[2] = {10, 20};
    const size_t to_zero[2] = {10, 10};
    const phx_status status = phx_symm_all_to_all_v(me.symm(), 0, sent, me.out(), rank == 0 ? to_zero : received,
                                                    PHX_DTYPE_F32, &options, nullptr);
    CHECK(status == PHX_OK || status == PHX_ERR_REVOKED);
    me.stream().wait();
    phx_error_info info{};
    info.struct_size = sizeof info;
    while (phx_group_get_error(me.group(), &info) == PHX_ERR_NOT_FOUND) std::this_thread::yield();
    CHECK(info.status == PHX_ERR_MISMATCH && info.peer == 0);
    CHECK(std::strstr(info.text, "sends a different number of elements than rank 1 expects") != nullptr);
  });
}

// Whoever comes later hears of it at once; the kernel of the other one ends.
TEST(ranks_that_disagree_are_told_both_calls) {
  gpu::needs_driver();
  for (const bool empty : {false, true})
    ranks::as_threads(2, [&](int rank, phx_world *world) {
      const Rank me(world, kSpace);
      const gpu::Options options = me.stream().options();
      const size_t count = rank == 0 ? 100 : empty ? 0 : 200;
      for (int i = 0; i < 100; ++i)  // more than there are lines to compare
        CHECK_OK(phx_symm_broadcast(me.symm(), 0, 8, PHX_DTYPE_F32, 0, &options, nullptr));
      if (rank == 1) CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
      const phx_status status =
          phx_symm_all_reduce(me.symm(), 0, me.out(), count, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr);
      if (rank == 0) {
        CHECK(status == PHX_OK);
        phx_barrier(me.group(), nullptr, nullptr);  // the other one may have found out before this returns
        me.stream().wait();
        phx_error_info info{};
        info.struct_size = sizeof info;
        while (phx_group_get_error(me.group(), &info) == PHX_ERR_NOT_FOUND) std::this_thread::yield();
        CHECK(info.status == PHX_ERR_MISMATCH && std::strstr(info.text, "(float32, 100, sum,") != nullptr);
      } else {
        CHECK(status == PHX_ERR_MISMATCH);
        const std::string told = phx_last_error();
        CHECK(told.find("rank 0") != std::string::npos && told.find("(float32, 100, sum,") != std::string::npos);
        CHECK(told.find(empty ? "(float32, 0, sum," : "(float32, 200, sum,") != std::string::npos);
        CHECK(told.find("#101 ") != std::string::npos);
      }
    });
}

// M7: what precedes a put on its stream is seen by what follows the wait.
TEST(signals_and_barriers_order_streams) {
  gpu::needs_driver();
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const Rank me(world, kSpace);
    const OwnStream &stream = me.stream();
    const gpu::Options options = stream.options();
    me.write(Bytes(kSpace, static_cast<unsigned char>(1 + rank)));
    for (int i = 0; i < 20; ++i) {  // this rank's turn comes after the other's
      if (rank == 1) CHECK_OK(phx_symm_enqueue_wait_signal(me.symm(), 0, 3, 0, stream.get()));
      CHECK_OK(phx_symm_enqueue_put_signal(me.symm(), 1 - rank, 3, stream.get()));
      if (rank == 0) CHECK_OK(phx_symm_enqueue_wait_signal(me.symm(), 1, 3, 0, stream.get()));
      CHECK_OK(phx_symm_enqueue_barrier(me.symm(), 5, 0, stream.get()));
    }
    CHECK_OK(phx_symm_enqueue_put_signal(me.symm(), rank, 4, stream.get()));  // to itself
    CHECK_OK(phx_symm_enqueue_wait_signal(me.symm(), rank, 4, 0, stream.get()));
    CHECK_OK(phx_symm_all_reduce(me.symm(), 0, me.out(), 100, PHX_DTYPE_U8, PHX_OP_SUM, &options, nullptr));
    CHECK(me.result(100) == Bytes(100, 3));
    CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
    // One that nobody sends.
    if (rank == 0) {
      CHECK_OK(phx_symm_enqueue_wait_signal(me.symm(), 1, 3, 20, stream.get()));
      stream.wait();
      CHECK_FAILS(PHX_ERR_TIMEOUT, "for rank 1", phx_symm_enqueue_barrier(me.symm(), 5, 0, stream.get()));
    }
    CHECK_FAILS(PHX_ERR_INVALID, "channel is 64", phx_symm_enqueue_barrier(me.symm(), 64, 0, stream.get()));
    CHECK_FAILS(PHX_ERR_INVALID, "group_rank is 2", phx_symm_enqueue_put_signal(me.symm(), 2, 0, stream.get()));
    phx_group *hosts = ranks::make_group(world, "hosts");
    phx_symm *host = nullptr;
    CHECK_OK(phx_symm_alloc(hosts, nullptr, 64, 0, &host));
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "memory is not on a GPU", phx_symm_enqueue_barrier(host, 0, 0, stream.get()));
    phx_symm_release(host);
    phx_group_release(hosts);
  });
}

// The API lets a channel be used for both.
TEST(signals_do_not_stand_in_for_a_rank_at_a_barrier_of_their_channel) {
  gpu::needs_driver();
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const Rank me(world, kSpace);
    const OwnStream &stream = me.stream();
    if (rank == 0)
      for (int i = 0; i < 3; ++i) CHECK_OK(phx_symm_enqueue_put_signal(me.symm(), 1, 7, stream.get()));
    for (int i = 0; i < 2; ++i) CHECK_OK(phx_symm_enqueue_barrier(me.symm(), 7, 0, stream.get()));
    if (rank == 1)
      for (int i = 0; i < 3; ++i) CHECK_OK(phx_symm_enqueue_wait_signal(me.symm(), 0, 7, 0, stream.get()));
    stream.wait();
    CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
    if (rank == 1) {
      CHECK_OK(phx_symm_enqueue_barrier(me.symm(), 7, 20, stream.get()));  // to which rank 0 does not come
      stream.wait();
      CHECK_FAILS(PHX_ERR_TIMEOUT, "for rank 0", phx_symm_enqueue_barrier(me.symm(), 7, 0, stream.get()));
    } else {
      CHECK(phx_barrier(me.group(), nullptr, nullptr) != PHX_OK);  // until rank 1 has found out
    }
  });
}

// Small ones too, which count on the GPU what they have sent.
TEST(a_graph_is_replayed) {
  gpu::needs_driver();
  ranks::as_threads(2, [](int, phx_world *world) {
    const Rank me(world, kSpace);
    const gpu::Options options = me.stream().options();
    for (const size_t count : {size_t{100}, size_t{4}}) {
      const gpu::Graph graph(me.stream(), [&] {
        CHECK_OK(phx_symm_all_reduce(me.symm(), 0, me.block(), count, PHX_DTYPE_I32, PHX_OP_SUM, &options, nullptr));
      });
      std::vector<int32_t> sums(count, 1);
      Bytes ones(count * 4);
      std::memcpy(ones.data(), sums.data(), ones.size());
      me.write(ones);
      CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
      for (int i = 0; i < 10; ++i) graph.replay();
      const Bytes content = me.content();
      std::memcpy(sums.data(), content.data(), ones.size());
      for (const int32_t sum : sums) CHECK(sum == 1 << 10);
      CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
    }
  });
}

// In a capture the driver refuses to wait for what is on streams, unless it is told that the thread knows what it does.
TEST(memory_that_is_released_in_a_capture_goes_when_its_kernels_are_through) {
  gpu::needs_driver();
  std::atomic<bool> captured{false}, came{false};
  ranks::as_threads(2, [&](int rank, phx_world *world) {
    phx_group *const group = ranks::make_group(world);
    const OwnStream stream, other;
    phx_symm *symm = nullptr;
    CHECK_OK(phx_symm_alloc(group, &kGpu, 4096, 0, &symm));
    if (rank == 0) {
      CHECK_OK(phx_symm_enqueue_barrier(symm, 0, 0, stream.get()));
      const gpu::Graph graph(other, [&] {
        captured = true;
        phx_symm_release(symm);
      });
      CHECK(came);
    } else {
      while (!captured) std::this_thread::yield();
      came = true;
      CHECK_OK(phx_symm_enqueue_barrier(symm, 0, 0, stream.get()));
      stream.wait();
      phx_symm_release(symm);
    }
    phx_group_release(group);
  });
}

TEST(more_ranks_than_processors_are_refused) {
  gpu::needs_driver();
  if (gpu::alive() < 0) check::skip("the fake driver, whose processors can be few");
  setenv("FAKE_CUDA_PROCESSORS", "1", 1);
  ranks::as_threads(2, [](int, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    phx_symm *symm = nullptr;
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "2 ranks share a GPU of 1 processors",
                phx_symm_alloc(group, &kGpu, 100, 0, &symm));
    phx_group_release(group);
  });
  unsetenv("FAKE_CUDA_PROCESSORS");
}

TEST(wrong_requests_say_so) {
  gpu::needs_driver();
  ranks::as_threads(1, [](int, phx_world *world) {
    const Rank me(world, kSpace);
    gpu::Options options = me.stream().options();
    float host[4] = {};
    CHECK_FAILS(PHX_ERR_INVALID, "out is not memory that",
                phx_symm_all_reduce(me.symm(), 0, host, 4, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
    phx_work *work = nullptr;
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "work must be NULL",
                phx_symm_all_reduce(me.symm(), 0, me.out(), 4, PHX_DTYPE_F32, PHX_OP_SUM, &options, &work));
    const size_t four = 4;
    CHECK_FAILS(PHX_ERR_INVALID, "out is not memory that",
                phx_symm_all_to_all_v(me.symm(), 0, &four, host, &four, PHX_DTYPE_F32, &options, nullptr));
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "work must be NULL",
                phx_symm_all_gather_v(me.symm(), 0, me.out(), &four, PHX_DTYPE_F32, &options, &work));
    CHECK_FAILS(PHX_ERR_INVALID, "end beyond",
                phx_symm_all_reduce(me.symm(), kSpace, me.out(), 4, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "the memory is not on a GPU",
                phx_all_reduce(me.group(), host, host, 4, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
    CHECK_OK(phx_symm_all_reduce(me.symm(), 0, me.out(), 0, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
  });
}

TEST(a_call_of_the_driver_that_fails_is_named_and_leaves_nothing) {
  gpu::needs_driver();
  if (gpu::alive() < 0) check::skip("the fake driver, which fails on demand");
  for (const char *function : {"cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2", "cuMemcpyHtoDAsync_v2",
                               "cuEventCreate", "cuDeviceGetUuid_v2"}) {
    ranks::as_threads(1, [&](int, phx_world *world) {
      phx_group *group = ranks::make_group(world);
      phx_symm *symm = nullptr;
      setenv("FAKE_CUDA_FAIL", function, 1);
      CHECK(phx_symm_alloc(group, &kGpu, 100, 0, &symm) == PHX_ERR_DEVICE);
      unsetenv("FAKE_CUDA_FAIL");
      CHECK(std::strstr(phx_last_error(), "CUDA_ERROR_UNKNOWN") != nullptr);
      phx_group_release(group);
    });
    CHECK(gpu::alive() == 0);
  }
  for (const char *function : {"cuLaunchKernel", "cuOccupancyMaxActiveBlocksPerMultiprocessor"}) {
    ranks::as_threads(1, [&](int, phx_world *world) {
      const Rank me(world, kSpace);
      const gpu::Options options = me.stream().options();
      setenv("FAKE_CUDA_FAIL", function, 1);
      CHECK_FAILS(PHX_ERR_DEVICE, "CUDA_ERROR_UNKNOWN",
                  phx_symm_all_reduce(me.symm(), 0, me.out(), 4, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
      unsetenv("FAKE_CUDA_FAIL");
    });
    CHECK(gpu::alive() == 0);
  }
  // What loads the kernels of a rank: without, memory is shared all the same.
  for (const char *function :
       {"cuModuleLoadData", "cuModuleGetFunctionCount", "cuModuleEnumerateFunctions", "cuFuncLoad", "cuFuncGetName"}) {
    setenv("FAKE_CUDA_FAIL", function, 1);
    ranks::as_threads(1, [&](int, phx_world *world) {
      const Rank me(world, kSpace);
      const gpu::Options options = me.stream().options();
      const phx_status status =
          phx_symm_all_reduce(me.symm(), 0, me.out(), 4, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr);
      me.stream().wait();
      if (std::strcmp(function, "cuModuleLoadData") != 0) {
        CHECK_OK(status);  // one at a time, when they are launched
      } else {
        CHECK(status == PHX_ERR_DEVICE && std::strstr(phx_last_error(), "loading the kernels") != nullptr);
      }
    });
    unsetenv("FAKE_CUDA_FAIL");
    CHECK(gpu::alive() == 0);
  }
}

TEST(nothing_is_left_behind) {
  gpu::needs_driver();
  if (gpu::alive() < 0) check::skip("the fake driver, which counts");
  const size_t before = gpu::open_files();
  for (int i = 0; i < 3; ++i) ranks::as_threads(2, each_collective);
  CHECK(gpu::alive() == 0);
  CHECK(gpu::open_files() == before);
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
