// Values by which collectives on GPUs choose their kernels: that they do, that no result depends on them, and that all
// ranks have the same. On the driver of the host, or on the one of fake_cuda/ (CTest gives that one), which counts.
#include <fstream>
#include <sstream>

#include "gpu_group.h"
#include "store_fixtures.h"

using namespace gpu_group;

namespace {

constexpr uint64_t kNever = uint64_t{1} << 62;

void needs_fake() {
  gpu::needs_driver();
  if (gpu::alive() < 0) check::skip("the fake driver, which counts launches");
}
void needs_fake_unstarted() {
  if (gpu::symbol<int()>("fake_cuda_alive") == nullptr) check::skip("the fake driver, which counts launches");
}
int launches(const std::string &kernel) { return gpu::symbol<int(const char *)>("fake_cuda_launches")(kernel.c_str()); }
int blocks_of_last(const std::string &kernel) {
  return gpu::symbol<int(const char *)>("fake_cuda_blocks")(kernel.c_str());
}

phx_gpu_tuning tuning(uint64_t line, uint64_t two_shot = 0, uint64_t multicast = 0, uint64_t copy = 0,
                      uint64_t thread = 0) {
  return {sizeof(phx_gpu_tuning), 0, line, two_shot, multicast, copy, thread};
}
phx_gpu_tuning tuning_of(phx_group *group) {
  phx_gpu_tuning values{};
  values.struct_size = sizeof values;
  CHECK_OK(phx_group_get_gpu_tuning(group, &values));
  return values;
}
void set(phx_group *group, const phx_gpu_tuning &values) { CHECK_OK(phx_group_set_gpu_tuning(group, &values, 0)); }
bool same(const phx_gpu_tuning &a, const phx_gpu_tuning &b) { return std::memcmp(&a, &b, sizeof a) == 0; }

// A first collective, with which the group gets a workspace, and so looks into the table.
void begin(const Rank &me) { CHECK_OK(gpu::barrier(me.group(), me.stream().get(), kGpu)); }

// How often kernels are launched by `call` on all ranks of this process together. Every rank gets the same numbers.
template <class Function>
std::vector<int> launched_by(const Rank &me, const std::vector<std::string> &kernels, const Function &call) {
  std::vector<int> counts;
  CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
  for (const std::string &kernel : kernels) counts.push_back(launches(kernel));
  CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
  CHECK_OK(call());
  me.stream().wait();
  CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
  for (size_t i = 0; i < kernels.size(); ++i) counts[i] = launches(kernels[i]) - counts[i];
  CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
  return counts;
}

// A table in a directory of its own.
class Table {
 public:
  Table() : path_(directory_.file("tuning")) {}
  const std::string &path() const { return path_; }
  void use() const { setenv("PHALANX_TUNING", path_.c_str(), 1); }
  void write(const std::string &text) const { std::ofstream(path_) << text; }
  std::string read() const {
    std::ostringstream text;
    text << std::ifstream(path_).rdbuf();
    return text.str();
  }

 private:
  fixtures::TemporaryDirectory directory_;
  std::string path_;
};

}  // namespace

// These two first: a forked child must find a driver that was not started.
TEST(ranks_with_different_tables_use_that_of_group_rank_0) {
  needs_fake_unstarted();
  const Table first, second;
  first.write("gpu=GPU_of_a_test ranks=2 shared=1 line_bytes=1 two_shot_bytes=8\n");
  second.write("gpu=GPU_of_a_test ranks=2 shared=1 line_bytes=5000 two_shot_bytes=5000 thread_bytes=64\n");
  ranks::all_zero(ranks::as_processes(2, [&](int rank, phx_world *world) {
    (rank == 0 ? first : second).use();
    const Rank me(world);
    const gpu::Options options = me.options();
    Gpu().write(me.in(), Bytes(64, static_cast<unsigned char>(rank + 1)));
    CHECK_OK(phx_all_reduce(me.group(), me.in(), me.out(), 64, PHX_DTYPE_U8, PHX_OP_SUM, &options, nullptr));
    CHECK(me.read(me.out(), 64) == Bytes(64, 3));
    CHECK(same(tuning_of(me.group()), tuning(1, 8, 64 << 10, kNever, 16)));
    CHECK(launches("phx_gpu_reduce_in_place_uint8_sum") == 1);
    CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
  }));
}

// Copies have failed on one rank: the others' kernels end, and the text says why.
TEST(copies_that_fail_end_the_group) {
  needs_fake_unstarted();
  ranks::all_zero(ranks::as_processes(2, [](int rank, phx_world *world) {
    const Rank me(world);
    phx_symm *symm = nullptr;
    CHECK_OK(phx_symm_rendezvous(me.group(), me.in(), 0, &symm));
    set(me.group(), tuning(0, 0, 0, 1));
    const gpu::Options options = me.options();
    if (rank == 1) setenv("FAKE_CUDA_FAIL", "cuMemcpyDtoDAsync_v2", 1);
    const phx_status status = phx_symm_all_gather(symm, 0, me.out(), 100, PHX_DTYPE_U8, &options, nullptr);
    unsetenv("FAKE_CUDA_FAIL");
    if (rank == 1) {
      CHECK(status == PHX_ERR_DEVICE);
      CHECK(std::strstr(phx_last_error(), "cuMemcpyDtoDAsync") != nullptr);
    } else {
      CHECK(status == PHX_OK || status == PHX_ERR_DEVICE);  // as it was before or after the other one
      CHECK(me.failure().status == PHX_ERR_DEVICE);
    }
    me.stream().wait();
    phx_symm_release(symm);
  }));
}

TEST(the_values_of_a_group_decide_which_kernel_an_all_reduce_is) {
  needs_fake();
  ranks::as_threads(3, [](int, phx_world *world) {
    const Rank me(world);
    const gpu::Options options = me.options();
    const std::vector<std::string> ways = {"phx_gpu_reduce_lines_float32_sum", "phx_gpu_reduce_float32_sum",
                                           "phx_gpu_reduce_in_place_float32_sum"};
    const auto launched = [&](const phx_gpu_tuning &values, size_t count) {
      set(me.group(), values);
      return launched_by(me, ways, [&] {
        return phx_all_reduce(me.group(), me.in(), me.out(), count, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr);
      });
    };
    CHECK(launched(tuning(0), 16) == std::vector<int>({3, 0, 0}));
    CHECK(launched(tuning(63), 16) == std::vector<int>({0, 3, 0}));
    CHECK(launched(tuning(64), 16) == std::vector<int>({3, 0, 0}));
    CHECK(launched(tuning(1, 65), 16) == std::vector<int>({0, 3, 0}));
    CHECK(launched(tuning(1, 64), 16) == std::vector<int>({0, 0, 3}));
    // More than the pads have room for: that much, and no more.
    CHECK(launched(tuning(kNever), 1000) == std::vector<int>({0, 3, 0}));
  });
}

TEST(two_ranks_reduce_in_two_steps_if_they_are_told_to) {
  needs_fake();
  ranks::as_threads(2, [](int, phx_world *world) {
    const Rank me(world);
    const gpu::Options options = me.options();
    const auto in_place = [&] {
      return launched_by(me, {"phx_gpu_reduce_in_place_float32_sum"}, [&] {
        return phx_all_reduce(me.group(), me.in(), me.out(), 1000, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr);
      });
    };
    CHECK(in_place() == std::vector<int>{0});
    CHECK(tuning_of(me.group()).two_shot_bytes == kNever);
    set(me.group(), tuning(0, 4000));
    CHECK(in_place() == std::vector<int>{2});
  });
}

TEST(a_gather_of_symmetric_memory_is_copied_from_the_size_that_is_set) {
  needs_fake();
  ranks::as_threads(3, [](int rank, phx_world *world) {
    const Rank me(world);
    phx_symm *symm = nullptr;
    CHECK_OK(phx_symm_rendezvous(me.group(), me.in(), 0, &symm));
    gpu::Options options = me.options();
    const std::vector<std::string> ways = {"phx_gpu_all_gather", "phx_gpu_barrier"};
    const auto launched = [&](uint64_t copy, size_t count) {
      set(me.group(), tuning(0, 0, 0, copy));
      const Bytes mine(count, static_cast<unsigned char>(rank + 1));
      Gpu().write(me.in() + 64, mine);
      Gpu().write(me.out(), Bytes(3 * count, 0));
      const std::vector<int> counts = launched_by(
          me, ways, [&] { return phx_symm_all_gather(symm, 64, me.out(), count, PHX_DTYPE_U8, &options, nullptr); });
      const Bytes seen = me.read(me.out(), 3 * count);
      for (size_t i = 0; i < seen.size(); ++i) CHECK(seen[i] == i / count + 1);
      return counts;
    };
    CHECK(launched(0, 5000) == std::vector<int>({3, 0}));
    CHECK(launched(15001, 5000) == std::vector<int>({3, 0}));
    CHECK(launched(15000, 5000) == std::vector<int>({0, 6}));  // of all ranks one before, and one after
    options.algo = PHX_ALGO_ONE_SHOT;
    CHECK(launched(1, 5000) == std::vector<int>({3, 0}));
    phx_symm_release(symm);
  });
}

TEST(switches_gather_from_the_size_that_is_set) {
  needs_fake();
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const phx_device own{PHX_DEVICE_CUDA, rank};
    phx_group *const group = ranks::make_group(world);
    void *block = nullptr;
    phx_symm *symm = nullptr;
    CHECK_OK(phx_mem_alloc(world, &own, kSpace, &block));
    CHECK_OK(phx_symm_rendezvous(group, block, 0, &symm));
    const Gpu gpu(rank);
    gpu::Options options;
    options.scale = 1;
    const auto spread = [&](uint64_t from) {
      set(group, tuning(0, 0, from));
      const int before = launches("phx_gpu_multimem_all_gather");
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      CHECK_OK(phx_symm_all_gather(symm, 0, static_cast<char *>(block) + 4096, 512, PHX_DTYPE_U8, &options, nullptr));
      CHECK(gpu.driver().stream_wait(nullptr) == 0);
      CHECK_OK(phx_barrier(group, nullptr, nullptr));
      return launches("phx_gpu_multimem_all_gather") - before;
    };
    CHECK(spread(0) == 0);
    CHECK(spread(1024) == 2);
    CHECK(spread(1025) == 0);
    phx_symm_release(symm);
    phx_mem_free(world, block);
    phx_group_release(group);
  });
}

TEST(threads_that_do_more_are_fewer) {
  needs_fake();
  ranks::as_threads(2, [](int, phx_world *world) {
    const Rank me(world);
    const gpu::Options options = me.options();
    const auto blocks = [&](uint64_t thread_bytes, size_t count) {
      set(me.group(), tuning(1, 0, 0, 0, thread_bytes));
      CHECK_OK(phx_all_gather(me.group(), me.in(), me.out(), count, PHX_DTYPE_U8, &options, nullptr));
      me.stream().wait();
      CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
      const int last = blocks_of_last("phx_gpu_all_gather");
      CHECK_OK(phx_barrier(me.hosts(), nullptr, nullptr));
      return last;
    };
    // A block has 4 threads, and of 6 processors each of the two ranks has 3.
    CHECK(blocks(0, 129) == 3);
    CHECK(blocks(32, 129) == 2);
    CHECK(blocks(32, 128) == 1);
    CHECK(blocks(4096, 5000) == 1);
    CHECK(blocks(16, 5000) == 3);
    // What is sent beside flags needs a thread for each 8 bytes, whatever is set.
    set(me.group(), tuning(0, 0, 0, 0, 4096));
    CHECK_OK(phx_all_reduce(me.group(), me.in(), me.out(), 24, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
    me.stream().wait();
    CHECK(blocks_of_last("phx_gpu_reduce_lines_float32_sum") == 3);
  });
}

TEST(no_result_depends_on_the_values) {
  gpu::needs_driver();
  const phx_gpu_tuning all[] = {tuning(0), tuning(1, 1, 1, 1, 4096), tuning(kNever, kNever, kNever, kNever, 48),
                                tuning(32, 100, 0, 200, 16)};
  ranks::as_threads(3, [&](int rank, phx_world *world) {
    const Rank me(world);
    int seed = 1;
    for (const phx_gpu_tuning &values : all) {
      set(me.group(), values);
      for (const size_t count : {size_t{1}, size_t{7}, size_t{100}, size_t{1000}})
        for (const Collective &one : collectives(3, rank, count, PHX_DTYPE_F32, PHX_OP_SUM, 1))
          for (const bool in_place : {false, true}) expect_as_on_host(me, one, PHX_DTYPE_F32, 3, in_place, ++seed);
    }
  });
}

TEST(group_rank_0_decides_and_what_is_zero_is_built_in) {
  ranks::as_threads(3, [](int rank, phx_world *world) {
    phx_group *const group = ranks::make_group(world);
    const phx_gpu_tuning first = tuning_of(group);
    CHECK(same(first, tuning(32 << 10, 256 << 10, 64 << 10, kNever, 16)));
    set(group, rank == 0 ? tuning(100, 0, 0, 300, 64) : tuning(7, 7, 7, 7, 16));
    CHECK(same(tuning_of(group), tuning(100, first.two_shot_bytes, first.multicast_bytes, 300, 64)));
    set(group, tuning(0));
    CHECK(same(tuning_of(group), first));
    phx_group_release(group);
  });
}

TEST(what_cannot_be_is_refused_on_all_ranks_and_changes_nothing) {
  ranks::as_threads(2, [](int, phx_world *world) {
    phx_group *const group = ranks::make_group(world);
    const phx_gpu_tuning first = tuning_of(group);
    const auto refused = [&](const phx_gpu_tuning &values, const char *text) {
      CHECK_FAILS(PHX_ERR_INVALID, text, phx_group_set_gpu_tuning(group, &values, 0));
      CHECK(same(tuning_of(group), first));
    };
    refused(tuning(kNever + 1), "line_bytes is 4611686018427387905; expected 0 to 4611686018427387904");
    refused(tuning(0, UINT64_MAX), "two_shot_bytes is 18446744073709551615; expected 0 to 4611686018427387904");
    for (const uint64_t wrong : {uint64_t{1}, uint64_t{24}, uint64_t{4112}, UINT64_MAX})
      refused(tuning(0, 0, 0, 0, wrong), "expected 16 to 4096, a multiple of 16");
    phx_gpu_tuning flagged = tuning(0);
    flagged.flags = 1;
    refused(flagged, "flags must be 0");
    CHECK_FAILS(PHX_ERR_INVALID, "tuning is NULL", phx_group_set_gpu_tuning(group, nullptr, 0));
    CHECK_FAILS(PHX_ERR_INVALID, "group is NULL", phx_group_save_gpu_tuning(nullptr, nullptr));
    CHECK_OK(phx_barrier(group, nullptr, nullptr));
    phx_group_release(group);
  });
}

TEST(a_rank_that_sets_other_values_than_these_is_told_so) {
  const phx_tuning host{sizeof(phx_tuning), 0, 0, 0, 0, 0};
  ranks::as_threads(2, [&](int rank, phx_world *world) {
    phx_group *const group = ranks::make_group(world);
    const phx_gpu_tuning values = tuning(0);
    const phx_status status =
        rank == 0 ? phx_group_set_tuning(group, &host, 0) : phx_group_set_gpu_tuning(group, &values, 0);
    CHECK(status != PHX_OK);
    CHECK(std::strstr(phx_last_error(), "group_set_gpu_tuning") != nullptr);
    phx_group_release(group);
  });
}

TEST(saved_values_are_those_of_later_groups_on_such_gpus) {
  gpu::needs_driver();
  const Table table;
  table.use();
  const phx_gpu_tuning mine = tuning(128, 5000, 6000, 7000, 32);
  const auto of_new_group = [&](int n) {
    ranks::as_threads(n, [&](int, phx_world *world) {
      const Rank me(world);
      CHECK(tuning_of(me.group()).line_bytes == 32 << 10);  // not before it is known which GPU it is
      begin(me);
      const bool is_mine = same(tuning_of(me.group()), mine);
      CHECK(is_mine == (n == 2));
      me.stream().wait();
    });
  };
  ranks::as_threads(2, [&](int rank, phx_world *world) {
    const Rank me(world);
    set(me.group(), mine);
    CHECK_FAILS(PHX_ERR_INVALID, "Make a rendezvous of GPU memory first",
                phx_group_save_gpu_tuning(me.group(), nullptr));
    begin(me);
    CHECK(same(tuning_of(me.group()), mine));  // what was set before the first rendezvous holds
    if (rank == 0) CHECK_OK(phx_group_save_gpu_tuning(me.group(), nullptr));
    CHECK_OK(phx_barrier(me.group(), nullptr, nullptr));
    me.stream().wait();
  });
  CHECK(table.read().find(" ranks=2 shared=1 line_bytes=128 two_shot_bytes=5000 multicast_bytes=6000 copy_bytes=7000 "
                          "thread_bytes=32\n") != std::string::npos);
  of_new_group(2);
  of_new_group(3);
  unsetenv("PHALANX_TUNING");
}

TEST(ranks_with_gpus_of_their_own_have_a_row_of_their_own) {
  needs_fake();
  const Table table;
  table.use();
  table.write(
      "gpu=GPU_of_a_test ranks=2 shared=1 line_bytes=11\ngpu=GPU_of_a_test ranks=2 shared=0 line_bytes=22\n"
      "gpu=another ranks=2 shared=0 line_bytes=33\n");
  for (const bool shared : {false, true})
    ranks::as_threads(2, [&](int rank, phx_world *world) {
      const phx_device device{PHX_DEVICE_CUDA, shared ? 1 : rank};
      phx_group *const group = ranks::make_group(world);
      void *block = nullptr;
      phx_symm *symm = nullptr;
      CHECK_OK(phx_mem_alloc(world, &device, 100, &block));
      CHECK_OK(phx_symm_rendezvous(group, block, 0, &symm));
      CHECK(tuning_of(group).line_bytes == (shared ? 11 : 22));
      CHECK(tuning_of(group).thread_bytes == 16);
      phx_symm_release(symm);
      phx_mem_free(world, block);
      phx_group_release(group);
    });
  unsetenv("PHALANX_TUNING");
}

TEST(a_table_with_values_that_cannot_be_is_no_table) {
  needs_fake();
  const Table table;
  table.use();
  const std::string row = "gpu=GPU_of_a_test ranks=1 shared=0 line_bytes=64 thread_bytes=";
  for (const char *const value : {"17", "65536", "9223372036854775808"}) {
    table.write(row + value + "\n");
    ranks::as_threads(1, [](int, phx_world *world) {
      const Rank me(world);
      begin(me);
      CHECK(tuning_of(me.group()).line_bytes == 32 << 10 && tuning_of(me.group()).thread_bytes == 16);
      me.stream().wait();
    });
  }
  table.write(row + "many\n");  // no number: as if it were not there
  ranks::as_threads(1, [](int, phx_world *world) {
    const Rank me(world);
    begin(me);
    CHECK(tuning_of(me.group()).line_bytes == 64 && tuning_of(me.group()).thread_bytes == 16);
    me.stream().wait();
  });
  unsetenv("PHALANX_TUNING");
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
