// What lies behind collectives of a group on ordinary memory of GPUs: a workspace that grows, graphs that outlive that,
// order between streams, inputs that are read where they lie, and what is said when something is wrong. On the driver
// of the host, or on the one of fake_cuda/ (CTest gives that one).
#include <csignal>
#include <cstring>

#include "gpu_group.h"

using namespace gpu_group;

namespace {

// Small workspaces, so that small calls make larger ones.
ranks::Options small() {
  ranks::Options options;
  options.staging_bytes = 256;
  return options;
}

void write(void *to, const std::vector<int32_t> &values) {
  Bytes bytes(values.size() * sizeof(int32_t));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  Gpu().write(to, bytes);
}
std::vector<int32_t> read(const Rank &me, const void *from, size_t count) {
  const Bytes bytes = me.read(from, count * sizeof(int32_t));
  std::vector<int32_t> values(count);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

phx_status gather(const Rank &me, const gpu::Options &options, size_t count) {
  return phx_all_gather(me.group(), me.in(), me.out(), count, PHX_DTYPE_I32, &options, nullptr);
}
// Rank k gave k + `more`.
void expect_gathered(const Rank &me, size_t count, int32_t more) {
  const std::vector<int32_t> seen = read(me, me.out(), count * static_cast<size_t>(me.size()));
  for (size_t i = 0; i < seen.size(); ++i) CHECK(seen[i] == static_cast<int32_t>(i / count) + more);
}

}  // namespace

// First: a forked child must find a driver that was not started.
TEST(a_kernel_ends_when_a_rank_dies) {
  if (gpu::symbol<int()>("cuInit") == nullptr) check::skip("libcuda.so.1");
  for (const bool grows : {false, true}) {
    const std::vector<int> codes = ranks::as_processes(
        2,
        [&](int rank, phx_world *world) {
          const Rank me(world);
          CHECK_OK(gather(me, me.options(), 10));
          me.stream().wait();
          CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
          if (rank == 1) raise(SIGKILL);
          const phx_status status = gather(me, me.options(60000), grows ? 1000 : 10);
          CHECK(status == PHX_OK || status == PHX_ERR_PEER_DEAD);
          me.stream().wait();  // the test's own limit is less than the timeout
          const phx_error_info info = me.failure();
          CHECK(info.status == PHX_ERR_PEER_DEAD && info.peer == 1);
          Gpu().write(me.in(), Bytes(100, 3));  // the GPU can be used
          CHECK(Gpu().read(me.in(), 100) == Bytes(100, 3));
        },
        small());
    CHECK(codes[0] == 0 && WIFSIGNALED(codes[1]));
  }
}

TEST(a_workspace_that_cannot_be_made_fails_alike) {
  if (gpu::symbol<int()>("fake_cuda_alive") == nullptr) check::skip("the fake driver, which fails on demand");
  setenv("FAKE_CUDA_FORKS", "1", 1);
  ranks::all_zero(ranks::as_processes(2, [](int rank, phx_world *world) {
    const Rank me(world);
    if (rank == 1) setenv("FAKE_CUDA_FAIL", "cuMemCreate", 1);
    CHECK_FAILS(PHX_ERR_DEVICE, "rank 1 could not make a workspace of 262144 bytes on its GPU",
                gather(me, me.options(), 10));
    unsetenv("FAKE_CUDA_FAIL");
    write(me.in(), std::vector<int32_t>(10, rank));
    CHECK_OK(gather(me, me.options(), 10));
    expect_gathered(me, 10, 0);
    CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
  }));
}

TEST(what_outgrows_the_workspace_gets_a_larger_one) {
  gpu::needs_driver();
  ranks::as_threads(
      3,
      [](int rank, phx_world *world) {
        const Rank me(world);
        int32_t more = 0;
        for (const size_t count : {size_t{1}, size_t{65}, size_t{64}, size_t{1000}, size_t{1024}, size_t{5000}}) {
          write(me.in(), std::vector<int32_t>(count, rank + ++more));
          CHECK_OK(gather(me, me.options(), count));
          expect_gathered(me, count, more);
        }
        size_t blocks = 0, bytes = 0;
        CHECK_OK(phx_mem_count(world, &blocks, &bytes));
        CHECK(blocks == 2);  // in and out: the workspaces are in no table
      },
      small());
}

// An old workspace is the graph's as long as the group is there.
TEST(a_graph_is_replayed_after_the_workspace_has_grown) {
  gpu::needs_driver();
  ranks::as_threads(
      2,
      [](int rank, phx_world *world) {
        const Rank me(world);
        const OwnStream stream;
        gpu::Options captured = me.options();
        captured.stream = stream.get();
        CHECK_OK(gather(me, me.options(), 50));
        me.stream().wait();
        const gpu::Graph graph(stream, [&] {
          CHECK_OK(gather(me, captured, 50));
          CHECK_FAILS(PHX_ERR_UNSUPPORTED, "make one call of that size before the capture", gather(me, captured, 1000));
        });
        CHECK_OK(gather(me, me.options(), 4000));
        me.stream().wait();
        for (int32_t more = 1; more <= 5; ++more) {
          write(me.in(), std::vector<int32_t>(50, rank + more));
          graph.replay();
          stream.wait();
          expect_gathered(me, 50, more);
        }
        CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
      },
      small());
}

TEST(a_captured_call_that_has_no_workspace_yet_says_what_to_do) {
  gpu::needs_driver();
  ranks::as_threads(1, [](int, phx_world *world) {
    const Rank me(world);
    const gpu::Graph none(me.stream(), [&] {
      CHECK_FAILS(PHX_ERR_UNSUPPORTED, "needs a workspace of 262144 bytes on the GPU, which has 0",
                  gather(me, me.options(), 50));
    });
    CHECK_OK(gather(me, me.options(), 50));
    me.stream().wait();
  });
}

// Both use the same workspace: what comes second waits for the first on the GPU.
TEST(calls_on_several_streams_keep_their_order) {
  gpu::needs_driver();
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const Rank me(world);
    const OwnStream other;
    gpu::Options second = me.options();
    second.stream = other.get();
    for (int32_t i = 0; i < 10; ++i) {
      write(me.in(), std::vector<int32_t>(2000, rank + i));
      CHECK_OK(gather(me, me.options(), 1000));
      // Reads what the first one gives.
      CHECK_OK(
          phx_reduce_scatter(me.group(), me.out(), me.out() + 8000, 1000, PHX_DTYPE_I32, PHX_OP_SUM, &second, nullptr));
      other.wait();
      expect_gathered(me, 1000, i);
      CHECK(read(me, me.out() + 8000, 1000) == std::vector<int32_t>(1000, 2 * (rank + i)));
    }
  });
}

TEST(coalesced_calls_go_one_after_the_other) {
  gpu::needs_driver();
  ranks::as_threads(3, [](int rank, phx_world *world) {
    const Rank me(world);
    const gpu::Options options = me.options();
    const auto in = [&](size_t at) { return me.in() + at * 4; };
    const auto out = [&](size_t at) { return me.out() + at * 4; };
    const auto call = [](int32_t kind, const void *from, void *to, size_t count, int32_t op, int32_t root) {
      return phx_call{sizeof(phx_call), kind, from, to, count, PHX_DTYPE_I32, op, root, 0};
    };
    const bool root = rank == 1;
    write(me.in(), std::vector<int32_t>(8000, 1 + rank));
    write(me.out(), std::vector<int32_t>(8000, 10 * rank));
    const std::vector<phx_call> calls = {
        call(PHX_CALL_ALL_REDUCE, in(0), out(0), 5, PHX_OP_SUM, 0),
        call(PHX_CALL_ALL_REDUCE, in(0), out(100), 900, PHX_OP_MAX, 0),
        call(PHX_CALL_ALL_GATHER, in(0), out(1000), 10, 0, 0),
        call(PHX_CALL_REDUCE_SCATTER, in(0), out(1100), 10, PHX_OP_SUM, 0),
        call(PHX_CALL_ALL_TO_ALL, in(0), out(1200), 10, 0, 0),
        call(PHX_CALL_BROADCAST, out(1300), out(1300), 10, 0, 1),
        call(PHX_CALL_REDUCE, in(0), out(1400), 10, PHX_OP_SUM, 1),
        call(PHX_CALL_GATHER, in(0), out(1500), 10, 0, 1),
        call(PHX_CALL_SCATTER, in(0), out(1600), 10, 0, 1),
    };
    std::vector<int32_t> wanted(8000, 10 * rank);
    const auto put = [&](size_t at, size_t count, int32_t value) {
      std::fill_n(wanted.begin() + static_cast<std::ptrdiff_t>(at), count, value);
    };
    put(0, 5, 6);
    put(100, 900, 3);
    for (size_t k = 0; k < 3; ++k) {
      put(1000 + 10 * k, 10, static_cast<int32_t>(1 + k));
      put(1200 + 10 * k, 10, static_cast<int32_t>(1 + k));
      if (root) put(1500 + 10 * k, 10, static_cast<int32_t>(1 + k));
    }
    put(1100, 10, 6);
    put(1300, 10, 10);
    if (root) put(1400, 10, 6);
    put(1600, 10, 2);
    for (int turn = 0; turn < 2; ++turn) {
      CHECK_OK(phx_coalesced(me.group(), calls.data(), calls.size(), &options, nullptr));
      CHECK(read(me, me.out(), 8000) == wanted);
    }
    CHECK_OK(phx_coalesced(me.group(), nullptr, 0, &options, nullptr));
    CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
  });
}

// What precedes it on any rank's stream is done when what follows it on another's begins.
TEST(a_barrier_orders_streams) {
  gpu::needs_driver();
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const Rank me(world);
    for (int i = 0; i < 5; ++i) CHECK_OK(gpu::barrier(me.group(), me.stream().get(), kGpu));
    me.stream().wait();
    if (rank == 0) {  // one to which the other does not come
      CHECK_OK(gpu::barrier(me.group(), me.stream().get(), kGpu, 30));
      me.stream().wait();
    }
    const phx_error_info info = me.failure();
    CHECK(info.status == PHX_ERR_TIMEOUT && info.peer == 1);
  });
}

namespace {

// A rank whose input lies in symmetric memory, if it is one of `symmetric`.
class Source {
 public:
  Source(phx_world *world, const Rank &me, bool symmetric) : world_(world) {
    CHECK_OK(phx_mem_alloc(world, &kGpu, kSpace, &block_));
    CHECK_OK(phx_symm_rendezvous(me.group(), block_, 0, &symm_));
    at_ = symmetric ? static_cast<char *>(block_) + 64 * me.self() : me.in();  // at an offset of its own
  }
  ~Source() {
    phx_symm_release(symm_);
    if (block_ != nullptr) phx_mem_free(world_, block_);
  }
  Source(const Source &) = delete;
  Source &operator=(const Source &) = delete;
  char *at() const { return at_; }
  void free() {
    phx_symm_release(symm_);
    CHECK_OK(phx_mem_free(world_, block_));
    symm_ = nullptr;
    block_ = nullptr;
  }

 private:
  phx_world *const world_;
  void *block_ = nullptr;
  phx_symm *symm_ = nullptr;
  char *at_ = nullptr;
};

}  // namespace

// M8: whatever the others do, and at whatever offsets.
TEST(inputs_in_symmetric_memory_are_read_where_they_lie) {
  gpu::needs_driver();
  for (const int which : {0, 1, 2})  // nobody, rank 1, all
    ranks::as_threads(3, [&](int rank, phx_world *world) {
      const Rank me(world);
      const bool symmetric = which == 2 || (which == 1 && rank == 1);
      const Source source(world, me, symmetric), unused(world, me, false);
      for (const Collective &one : collectives(3, rank, 700, PHX_DTYPE_F32, PHX_OP_SUM, 1)) {
        if (std::strcmp(one.name, "broadcast") == 0) continue;
        const Bytes given = random_input(rank, PHX_DTYPE_F32, one.in);
        if (!given.empty()) Gpu().write(source.at(), given);
        gpu::Options options = me.options();
        const uint64_t before = me.zero_copies();
        Bytes host(one.out * 4, 0);
        CHECK_OK(one.call(me.group(), source.at(), me.out(), &options));
        const Bytes seen = me.read(me.out(), host.size());
        const bool copied = !symmetric || given.empty() || std::strcmp(one.name, "all_to_all_v") == 0;
        // Small ones of all_reduce send what they read.
        const uint64_t counted = copied || (std::strcmp(one.name, "all_reduce") == 0 && 2800 <= 8 * 4 * 8) ? 0 : 1;
        CHECK(me.zero_copies() - before == counted);
        options.stream = nullptr;
        options.device = {};
        CHECK_OK(one.call(me.hosts(), given.data(), host.data(), &options));
        if (seen != host) check::failed(__FILE__, __LINE__, one.name);
      }
      CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
    });
}

TEST(an_all_reduce_in_place_in_symmetric_memory_is_not_read_while_it_is_written) {
  gpu::needs_driver();
  for (const size_t count : {size_t{700}, size_t{140001}})
    ranks::as_threads(3, [&](int rank, phx_world *world) {
      const Rank me(world, size_t{1} << 20);
      void *block = nullptr;
      phx_symm *symm = nullptr;
      CHECK_OK(phx_mem_alloc(world, &kGpu, size_t{1} << 20, &block));
      CHECK_OK(phx_symm_rendezvous(me.group(), block, 0, &symm));
      const gpu::Options options = me.options();
      for (int turn = 0; turn < 3; ++turn) {
        write(block, std::vector<int32_t>(count, rank + turn));
        CHECK_OK(phx_all_reduce(me.group(), block, block, count, PHX_DTYPE_I32, PHX_OP_SUM, &options, nullptr));
        CHECK(read(me, block, count) == std::vector<int32_t>(count, 3 + 3 * turn));
      }
      CHECK(me.zero_copies() == (count > 1000 ? 3 : 0));
      CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
      phx_symm_release(symm);
      CHECK_OK(phx_mem_free(world, block));
    });
}

// The flag tells the others, who copy from then on; one that has read it too early is told by the kernel.
TEST(memory_that_another_rank_has_freed_is_copied) {
  gpu::needs_driver();
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const Rank me(world);
    Source source(world, me, rank == 0);
    if (rank == 1) source.free();
    CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
    write(source.at(), std::vector<int32_t>(1000, rank));
    const gpu::Options options = me.options();
    CHECK_OK(phx_all_gather(me.group(), source.at(), me.out(), 1000, PHX_DTYPE_I32, &options, nullptr));
    expect_gathered(me, 1000, 0);
    CHECK(me.zero_copies() == 0);
  });
}

TEST(memory_that_is_freed_too_early_is_named) {
  gpu::needs_driver();
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const Rank me(world);
    Source source(world, me, rank == 0);
    const gpu::Options options = me.options();
    CHECK_OK(gpu::barrier(me.group(), me.stream().get(), kGpu));
    if (rank == 0) CHECK_OK(phx_all_gather(me.group(), source.at(), me.out(), 1000, PHX_DTYPE_I32, &options, nullptr));
    CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
    if (rank == 1) {
      source.free();
      CHECK_OK(phx_all_gather(me.group(), me.in(), me.out(), 1000, PHX_DTYPE_I32, &options, nullptr));
      me.stream().wait();
    }
    const phx_error_info info = me.failure();
    CHECK(info.status == PHX_ERR_MISMATCH && info.peer == 0);
    CHECK(std::strstr(info.text, "lies in symmetric memory that rank 1 has freed") != nullptr);
    me.stream().wait();
  });
}

namespace {

// Rank 1 calls something else than rank 0; both hear of it, soon, whoever waits where.
void disagree(size_t before, size_t count, size_t other, bool late_first) {
  ranks::as_threads(
      2,
      [=](int rank, phx_world *world) {
        const Rank me(world);
        if (before != 0) CHECK_OK(gather(me, me.options(), before));
        if (before != 0) me.stream().wait();
        CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
        if (rank == (late_first ? 0 : 1)) {
          size_t blocks = 0, bytes = 0;  // the other one begins
          for (int i = 0; i < 1000; ++i) CHECK_OK(phx_mem_count(world, &blocks, &bytes));
        }
        const phx_status status = gather(me, me.options(), rank == 0 ? count : other);
        if (status != PHX_OK && status != PHX_ERR_MISMATCH && status != PHX_ERR_REVOKED)
          check::failed(__FILE__, __LINE__, std::string(phx_status_name(status)) + ": " + phx_last_error());
        const phx_error_info info = me.failure();
        CHECK(info.status == PHX_ERR_MISMATCH);
        const std::string first = "all_gather(int32, " + std::to_string(count) + ")";
        const std::string second = "all_gather(int32, " + std::to_string(other) + ")";
        CHECK(std::strstr(info.text, first.c_str()) != nullptr && std::strstr(info.text, second.c_str()) != nullptr);
        me.stream().wait();  // kernels have ended
      },
      small());
}

}  // namespace

// F2
TEST(ranks_that_disagree_are_told_both_calls) {
  gpu::needs_driver();
  for (const bool late_first : {false, true}) {
    disagree(0, 10, 20, late_first);       // both make their first workspace
    disagree(10, 20, 30, late_first);      // nobody makes one
    disagree(10, 20, 3000, late_first);    // rank 1 makes one
    disagree(10, 2000, 30, late_first);    // rank 0 makes one
    disagree(10, 2000, 9000, late_first);  // both make one, of different sizes
  }
}

// F3
TEST(a_rank_that_does_not_come_is_named) {
  gpu::needs_driver();
  for (const bool grows : {false, true})
    ranks::as_threads(
        2,
        [&](int rank, phx_world *world) {
          const Rank me(world);
          CHECK_OK(gather(me, me.options(), 10));
          me.stream().wait();
          if (rank == 0) {
            const phx_status status = gather(me, me.options(50), grows ? 1000 : 10);
            CHECK(status == (grows ? PHX_ERR_TIMEOUT : PHX_OK));
            if (grows) CHECK(std::strstr(phx_last_error(), "still waits for rank 1") != nullptr);
            me.stream().wait();
          }
          const phx_error_info info = me.failure();
          CHECK(info.status == PHX_ERR_TIMEOUT && info.peer == 1);
          CHECK(gather(me, me.options(), 10) != PHX_OK);
        },
        small());
}

TEST(counts_of_a_ragged_exchange_that_differ_are_found_out) {
  gpu::needs_driver();
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const Rank me(world);
    const gpu::Options options = me.options();
    const size_t sent[2] = {10, rank == 0 ? 21 : size_t{20}}, received[2] = {10, 20}, to_zero[2] = {10, 10};
    const phx_status status = phx_all_to_all_v(me.group(), me.in(), sent, me.out(), rank == 0 ? to_zero : received,
                                               PHX_DTYPE_F32, &options, nullptr);
    CHECK(status == PHX_OK || status == PHX_ERR_REVOKED);
    me.stream().wait();
    const phx_error_info info = me.failure();
    CHECK(info.status == PHX_ERR_MISMATCH && info.peer == 0);
    CHECK(std::strstr(info.text, "sends a different number of elements than rank 1 expects") != nullptr);
  });
}

// One rank's GPU has no memory left: it fails on all ranks alike, and the group goes on.
TEST(wrong_requests_say_so_before_anything_is_sent) {
  gpu::needs_driver();
  ranks::as_threads(1, [](int, phx_world *world) {
    const Rank me(world);
    const gpu::Options good = me.options();
    float host[64] = {};
    const auto reduce = [&](const void *in, void *out, const gpu::Options &options, phx_work **work) {
      return phx_all_reduce(me.group(), in, out, 50, PHX_DTYPE_F32, PHX_OP_SUM, &options, work);
    };
    phx_work *work = nullptr;
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "work must be NULL", reduce(me.in(), me.out(), good, &work));
    CHECK_FAILS(PHX_ERR_INVALID, "in is not memory that the GPU", reduce(host, me.out(), good, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "out is not memory that", reduce(me.in(), host, good, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "input and output overlap", reduce(me.in(), me.in() + 4, good, nullptr));
    gpu::Options options = good;
    options.device = {};
    CHECK_FAILS(PHX_ERR_INVALID, "set phx_gpu_options.device", reduce(host, host, options, nullptr));
    options.device = {PHX_DEVICE_CPU, 0};
    CHECK_FAILS(PHX_ERR_INVALID, "set phx_gpu_options.device", reduce(host, host, options, nullptr));
    options.device = {7, 0};
    CHECK_FAILS(PHX_ERR_INVALID, "unknown device type 7", reduce(me.in(), me.out(), options, nullptr));
    options.device = {PHX_DEVICE_CUDA, 99};
    CHECK_FAILS(PHX_ERR_INVALID, "there is no CUDA device 99", reduce(me.in(), me.out(), options, nullptr));
    const phx_call call{sizeof(phx_call), PHX_CALL_ALL_GATHER, me.in(), host, 4, PHX_DTYPE_F32, 0, 0, 0};
    CHECK_FAILS(PHX_ERR_INVALID, "out is not memory that", phx_coalesced(me.group(), &call, 1, &good, nullptr));
    // An older caller's options end before what says where memory lies.
    options = good;
    options.struct_size = offsetof(phx_options, gpu);
    CHECK_OK(reduce(host, host, options, nullptr));
  });
}

TEST(a_call_of_the_driver_that_fails_is_named_and_leaves_nothing) {
  gpu::needs_driver();
  if (gpu::alive() < 0) check::skip("the fake driver, which fails on demand");
  for (const char *function : {"cuEventCreate", "cuMemCreate", "cuMemHostRegister_v2", "cuMemcpyDtoDAsync_v2",
                               "cuStreamIsCapturing", "cuEventRecord", "cuLaunchKernel", "cuModuleLoadData"}) {
    ranks::as_threads(1, [&](int, phx_world *world) {
      const Rank me(world);
      const gpu::Options options = me.options();
      setenv("FAKE_CUDA_FAIL", function, 1);
      const phx_status status =
          phx_reduce_scatter(me.group(), me.in(), me.out(), 4, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr);
      unsetenv("FAKE_CUDA_FAIL");
      CHECK(status == PHX_ERR_DEVICE && std::strstr(phx_last_error(), "CUDA_ERROR_UNKNOWN") != nullptr);
    });
    CHECK(gpu::alive() == 0);
  }
}

TEST(a_handle_of_symmetric_memory_may_outlive_its_group) {
  gpu::needs_driver();
  ranks::as_threads(2, [](int, phx_world *world) {
    phx_group *group = ranks::make_group(world);
    void *block = nullptr;
    phx_symm *symm = nullptr;
    CHECK_OK(phx_mem_alloc(world, &kGpu, kSpace, &block));
    CHECK_OK(phx_symm_rendezvous(group, block, 0, &symm));
    const OwnStream stream;
    CHECK_OK(gpu::barrier(group, stream.get(), kGpu));
    stream.wait();
    phx_group_release(group);
    CHECK_OK(phx_mem_free(world, block));
    phx_symm_release(symm);  // the last that holds the group
  });
  if (gpu::alive() >= 0) CHECK(gpu::alive() == 0);
}

TEST(nothing_is_left_behind) {
  gpu::needs_driver();
  if (gpu::alive() < 0) check::skip("the fake driver, which counts");
  const size_t before = gpu::open_files();
  for (int i = 0; i < 3; ++i)
    ranks::as_threads(
        2,
        [](int rank, phx_world *world) {
          const Rank me(world);
          const Source source(world, me, true);
          for (const size_t count : {size_t{10}, size_t{1000}}) {
            write(source.at(), std::vector<int32_t>(count, rank));
            const gpu::Options options = me.options();
            CHECK_OK(phx_all_gather(me.group(), source.at(), me.out(), count, PHX_DTYPE_I32, &options, nullptr));
            expect_gathered(me, count, 0);
          }
        },
        small());
  CHECK(gpu::alive() == 0);
  CHECK(gpu::open_files() == before);
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
