// Multicast: each rank has a GPU of its own, and NVLink switches write to all of them, and add up what they have. On
// the driver of the host, or on the one of fake_cuda/ (CTest gives that one), whose kernels go over the blocks.
#include <csignal>
#include <cstring>
#include <random>

#include "gpu.h"
#include "kernel_reference.h"
#include "ranks.h"

using gpu::Gpu;
using kernel_test::Bytes;
using kernel_test::random_elements;
using kernel_test::reference;

namespace {

constexpr size_t kSpace = size_t{17} << 12;  // more than an all_gather takes to be stored to all

phx_device gpu_of(int rank) { return {PHX_DEVICE_CUDA, rank}; }

void needs_gpus(int n) {
  if (gpu::symbol<int()>("cuInit") == nullptr) check::skip("libcuda.so.1");
  if (gpu::count() < n) check::skip("as many GPUs as ranks");
}
void needs_fake() {
  if (gpu::alive() < 0) check::skip("the fake driver, which counts, and fails on demand");
}
// Whether switches connect the GPUs of this host: else there is nothing to see.
bool has_switches() {
  std::string problem;
  const phx::cuda::Driver *const driver = phx::cuda::find_driver(&problem);
  int has = 0;
  return driver != nullptr && driver->knows_multicast() &&
         driver->device_attribute(&has, phx::cuda::kHasMulticast, 0) == 0 && has != 0;
}
int launches(const std::string &kernel) {
  auto *const count = gpu::symbol<int(const char *)>("fake_cuda_launches");
  return count == nullptr ? -1 : count(kernel.c_str());
}

phx_team team_of(phx_symm *symm) {
  phx_team team{};
  team.struct_size = sizeof team;
  CHECK_OK(phx_symm_get_team(symm, &team));
  return team;
}

// A rank on its GPU: a block, a second one for results, ordinary memory for results, a stream.
class Rank {
 public:
  Rank(phx_world *world, int device)
      : world_(world), group_(ranks::make_group(world)), gpu_(device), size_(phx_world_size(world)) {
    const phx_device own = gpu_of(device);
    CHECK_OK(phx_mem_alloc(world, &own, kSpace, &block_));
    CHECK_OK(phx_mem_alloc(world, &own, kSpace, &shared_));
    CHECK_OK(phx_mem_alloc(world, &own, kSpace, &out_));
    CHECK_OK(phx_symm_rendezvous(group_, block_, 0, &symm_));
    CHECK_OK(phx_symm_rendezvous(group_, shared_, 0, &other_));
    CHECK(gpu_.driver().stream_create(&stream_, phx::cuda::kNonBlocking) == 0);
  }
  ~Rank() {
    gpu_.driver().stream_destroy(stream_);
    phx_symm_release(other_);
    phx_symm_release(symm_);
    for (void *const memory : {out_, shared_, block_}) phx_mem_free(world_, memory);
    phx_group_release(group_);
  }
  Rank(const Rank &) = delete;
  Rank &operator=(const Rank &) = delete;

  int size() const { return size_; }
  phx_group *group() const { return group_; }
  phx_symm *symm() const { return symm_; }
  char *block() const { return static_cast<char *>(block_); }
  char *shared() const { return static_cast<char *>(shared_); }  // symmetric memory, too
  char *out() const { return static_cast<char *>(out_); }
  gpu::Options options(int32_t algo = PHX_ALGO_MULTIMEM) const {
    gpu::Options options;
    options.timeout_ms = 20000;
    options.scale = 1;
    options.algo = algo;
    options.stream = stream_;
    return options;
  }
  void write(void *to, const Bytes &bytes) const { gpu_.write(to, bytes); }
  Bytes read(const void *from, size_t bytes) const {
    CHECK(gpu_.driver().stream_wait(stream_) == 0);
    return gpu_.read(from, bytes);
  }
  void meet() const { CHECK_OK(phx_barrier(group_, nullptr, nullptr)); }

 private:
  phx_world *const world_;
  phx_group *const group_;
  const Gpu gpu_;
  const int size_;
  void *block_ = nullptr, *shared_ = nullptr, *out_ = nullptr;
  phx_symm *symm_ = nullptr, *other_ = nullptr;
  phx::cuda::Stream stream_ = nullptr;
};

struct Pair {
  int32_t dtype, op;
};
// What PTX has instructions for.
std::vector<Pair> pairs() {
  std::vector<Pair> all;
  for (const int32_t dtype : {PHX_DTYPE_F16, PHX_DTYPE_BF16, PHX_DTYPE_F32, PHX_DTYPE_F64, PHX_DTYPE_I32, PHX_DTYPE_U32,
                              PHX_DTYPE_I64, PHX_DTYPE_U64, PHX_DTYPE_C64, PHX_DTYPE_C128})
    all.push_back({dtype, PHX_OP_SUM});
  for (const int32_t dtype :
       {PHX_DTYPE_F16, PHX_DTYPE_BF16, PHX_DTYPE_I32, PHX_DTYPE_U32, PHX_DTYPE_I64, PHX_DTYPE_U64})
    for (const int32_t op : {PHX_OP_MIN, PHX_OP_MAX}) all.push_back({dtype, op});
  for (const int32_t dtype : {PHX_DTYPE_I8, PHX_DTYPE_U8, PHX_DTYPE_I16, PHX_DTYPE_U16, PHX_DTYPE_I32, PHX_DTYPE_U32,
                              PHX_DTYPE_I64, PHX_DTYPE_U64})
    for (const int32_t op : {PHX_OP_BAND, PHX_OP_BOR, PHX_OP_BXOR}) all.push_back({dtype, op});
  return all;
}
bool is_one_of(const std::vector<Pair> &all, int32_t dtype, int32_t op) {
  for (const Pair &pair : all)
    if (pair.dtype == dtype && pair.op == op) return true;
  return false;
}

// Which NaN comes out is the switch's choice: they all become one.
Bytes settled(Bytes bytes, int32_t dtype) {
  const auto settle = [&](auto word, uint64_t infinity) {
    for (size_t at = 0; at + sizeof word <= bytes.size(); at += sizeof word) {
      std::memcpy(&word, &bytes[at], sizeof word);
      const uint64_t magnitude = word & (~uint64_t{0} >> (65 - 8 * sizeof word));
      if (magnitude > infinity) std::memset(&bytes[at], 0xff, sizeof word);
    }
  };
  if (dtype == PHX_DTYPE_F16) settle(uint16_t{}, 0x7c00);
  if (dtype == PHX_DTYPE_BF16) settle(uint16_t{}, 0x7f80);
  if (dtype == PHX_DTYPE_F32 || dtype == PHX_DTYPE_C64) settle(uint32_t{}, 0x7f800000);
  if (dtype == PHX_DTYPE_F64 || dtype == PHX_DTYPE_C128) settle(uint64_t{}, 0x7ff0000000000000);
  return bytes;
}
void expect(const Bytes &got, const Bytes &wanted, const Pair &pair, const char *what) {
  if (settled(got, pair.dtype) == settled(wanted, pair.dtype)) return;
  const std::string text =
      std::string(what) + " of " + phx_dtype_name(pair.dtype) + " " + phx_op_name(pair.op) + " is wrong";
  check::failed(__FILE__, __LINE__, text.c_str());
}

std::vector<Bytes> inputs(int seed, int32_t dtype, int n, size_t count) {
  std::mt19937_64 random(static_cast<uint64_t>(seed));
  std::vector<Bytes> in;
  for (int k = 0; k < n; ++k) in.push_back(random_elements(random, dtype, count));
  return in;
}
Bytes part(const Bytes &bytes, size_t begin, size_t size) {
  return {bytes.begin() + static_cast<std::ptrdiff_t>(begin),
          bytes.begin() + static_cast<std::ptrdiff_t>(begin + size)};
}
bool is_floating(int32_t dtype) {
  return kernel_test::is_float(dtype) || dtype == PHX_DTYPE_C64 || dtype == PHX_DTYPE_C128;
}

// Around the results nothing changes, whatever `offset` elements do to packs.
void reduce(const Rank &me, int rank, const Pair &pair, size_t count, size_t offset_elements, int seed) {
  const int n = me.size();
  const size_t item = phx_dtype_size(pair.dtype), bytes = count * item, offset = offset_elements * item;
  const std::vector<Bytes> in = inputs(seed, pair.dtype, n, n * count);
  const Bytes wanted = reference(in, n * count, pair.dtype, pair.op, n, 1);
  const gpu::Options options = me.options();
  Bytes before(kSpace, 0x5a);
  std::memcpy(before.data() + offset, in[rank].data(), in[rank].size());
  me.write(me.block(), before);
  me.write(me.out(), Bytes(kSpace, 0x5a));
  me.meet();
  CHECK_OK(phx_symm_reduce_scatter(me.symm(), offset, me.out() + item, count, pair.dtype, pair.op, &options, nullptr));
  expect(me.read(me.out() + item, bytes), part(wanted, rank * bytes, bytes), pair, "reduce_scatter");
  CHECK_OK(phx_symm_reduce(me.symm(), offset, rank == n - 1 ? me.out() : nullptr, count, pair.dtype, pair.op, n - 1,
                           &options, nullptr));
  if (rank == n - 1) expect(me.read(me.out(), bytes), part(wanted, 0, bytes), pair, "reduce");
  const bool alone = !is_floating(pair.dtype) || (n == 2 && pair.op == PHX_OP_SUM);
  char *const result = alone ? me.out() : me.shared() + offset;
  me.write(result, Bytes(bytes + item, 0x5a));
  me.meet();
  CHECK_OK(phx_symm_all_reduce(me.symm(), offset, result, count, pair.dtype, pair.op, &options, nullptr));
  expect(me.read(result, bytes), part(wanted, 0, bytes), pair, "all_reduce");
  CHECK(me.read(result + bytes, item) == Bytes(item, 0x5a));
  CHECK(me.read(me.block(), kSpace) == before);
  CHECK_OK(phx_symm_all_reduce(me.symm(), offset, me.block() + offset, count, pair.dtype, pair.op, &options, nullptr));
  const Bytes after = me.read(me.block(), kSpace);
  expect(part(after, offset, bytes), part(wanted, 0, bytes), pair, "all_reduce in place");
  CHECK(part(after, 0, offset) == part(before, 0, offset));
  CHECK(part(after, offset + bytes, kSpace - offset - bytes) == part(before, offset + bytes, kSpace - offset - bytes));
  me.meet();
}

void reduce_each(int rank, phx_world *world, const std::vector<Pair> &some, const std::vector<size_t> &counts) {
  if (!has_switches()) return;
  const Rank me(world, rank);
  int seed = 10;
  for (const Pair &pair : some)
    for (const size_t count : counts) {
      ++seed;
      reduce(me, rank, pair, count, seed % 2 == 0 ? 0 : 3, seed);
    }
}

}  // namespace

// First: a forked child must find a driver that was not started.
TEST(ranks_as_processes_reduce_by_switches) {
  needs_gpus(4);
  for (const int n : {2, 4})
    ranks::all_zero(ranks::as_processes(n, [](int rank, phx_world *world) {
      reduce_each(rank, world, {{PHX_DTYPE_F32, PHX_OP_SUM}, {PHX_DTYPE_BF16, PHX_OP_SUM}, {PHX_DTYPE_I32, PHX_OP_MAX}},
                  {2, 64, 1001});
    }));
}

TEST(every_pair_that_switches_know_gives_the_same_as_the_host) {
  needs_gpus(3);
  ranks::as_threads(3, [](int rank, phx_world *world) { reduce_each(rank, world, pairs(), {131, 66, 1}); });
}

// M: a team's multicast is one address for all blocks.
TEST(a_team_has_multicast_where_each_rank_has_a_gpu_of_its_own) {
  needs_gpus(2);
  needs_fake();
  ranks::as_threads(2, [](int rank, phx_world *world) {
    if (!has_switches()) return;
    const Rank me(world, rank);
    const phx_team team = team_of(me.symm());
    CHECK(team.multicast != nullptr && team.bytes == kSpace);
    for (int k = 0; k < 2; ++k) CHECK(team.multicast != phx_symm_buffer(me.symm(), k));
    me.meet();
  });
  CHECK(gpu::alive() == 0);
}

TEST(a_broadcast_is_stored_once_to_all) {
  needs_gpus(3);
  ranks::as_threads(3, [](int rank, phx_world *world) {
    if (!has_switches()) return;
    const Rank me(world, rank);
    const int before = launches("phx_gpu_multimem_broadcast");
    for (const int32_t algo : std::initializer_list<phx_algo>{PHX_ALGO_AUTO, PHX_ALGO_MULTIMEM})
      for (const size_t offset : {size_t{0}, size_t{5}, size_t{32}})
        for (const size_t count : {size_t{1}, size_t{16}, size_t{47}, size_t{4099}}) {
          const std::vector<Bytes> in = inputs(static_cast<int>(count), PHX_DTYPE_U8, 3, kSpace);
          me.write(me.block(), in[rank]);
          me.meet();
          const gpu::Options options = me.options(algo);
          CHECK_OK(phx_symm_broadcast(me.symm(), offset, count, PHX_DTYPE_U8, 1, &options, nullptr));
          Bytes wanted = in[rank];
          std::memcpy(wanted.data() + offset, in[1].data() + offset, count);
          CHECK(me.read(me.block(), kSpace) == wanted);
          me.meet();
        }
    if (before >= 0) CHECK(launches("phx_gpu_multimem_broadcast") - before >= 24);
  });
}

// Where the results do not lie in one place, or in no symmetric memory, each rank fetches.
TEST(an_all_gather_is_stored_to_all_where_the_results_lie_in_one_place) {
  needs_gpus(2);
  ranks::as_threads(2, [](int rank, phx_world *world) {
    if (!has_switches()) return;
    const Rank me(world, rank);
    const size_t part_bytes = kSpace / 2;  // the result is as large as AUTO asks for
    const std::vector<Bytes> in = inputs(5, PHX_DTYPE_U8, 2, part_bytes);
    me.write(me.block(), in[rank]);
    Bytes wanted = in[0];
    wanted.insert(wanted.end(), in[1].begin(), in[1].end());
    const gpu::Options options = me.options(PHX_ALGO_AUTO), strict = me.options();
    for (char *const out : {me.shared(), me.out(), rank == 0 ? me.shared() : me.out()}) {
      me.write(me.shared(), Bytes(kSpace, 1));
      me.meet();
      CHECK_OK(phx_symm_all_gather(me.symm(), 0, out, part_bytes, PHX_DTYPE_U8, &options, nullptr));
      CHECK(me.read(out, kSpace) == wanted);
      if (out != me.shared()) CHECK(me.read(me.shared(), kSpace) == Bytes(kSpace, 1));
      me.meet();
    }
    // In the block itself, behind the input; and by request.
    me.write(me.shared(), Bytes(kSpace, 1));
    me.meet();
    CHECK_OK(phx_symm_all_gather(me.symm(), 0, me.block() + 4096, 1024, PHX_DTYPE_F16, &strict, nullptr));
    CHECK_OK(phx_symm_all_gather(me.symm(), 0, me.shared() + 64, 48, PHX_DTYPE_U8, &strict, nullptr));
    const Bytes here = me.read(me.block() + 4096, 4096), there = me.read(me.shared(), 200);
    for (int k = 0; k < 2; ++k) {
      CHECK(part(here, static_cast<size_t>(k) * 2048, 2048) == part(in[k], 0, 2048));
      CHECK(part(there, 64 + static_cast<size_t>(k) * 48, 48) == part(in[k], 0, 48));
    }
    CHECK(part(there, 0, 64) == Bytes(64, 1) && part(there, 160, 40) == Bytes(40, 1));
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "out must be in symmetric memory",
                phx_symm_all_gather(me.symm(), 0, me.out(), 16, PHX_DTYPE_U8, &strict, nullptr));
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "size 17 and offset 0 are not both multiples of 16",
                phx_symm_all_gather(me.symm(), 0, me.shared(), 17, PHX_DTYPE_U8, &strict, nullptr));
    me.meet();
  });
}

// C11: what could have other bits on another rank is refused, and so is what no switch can do.
TEST(what_switches_cannot_do_is_refused_alike_and_leaves_the_group_usable) {
  needs_gpus(3);
  ranks::as_threads(3, [](int rank, phx_world *world) {
    if (!has_switches()) return;
    const Rank me(world, rank);
    const gpu::Options options = me.options();
    const std::vector<Pair> known = pairs();
    kernel_test::for_each_pair([&](int32_t dtype, int32_t op) {
      if (is_one_of(known, dtype, op)) return;
      CHECK_FAILS(PHX_ERR_UNSUPPORTED, "NVLink switches cannot compute",
                  phx_symm_all_reduce(me.symm(), 0, me.block(), 4, dtype, op, &options, nullptr));
    });
    for (const Pair pair : {Pair{PHX_DTYPE_F32, PHX_OP_SUM}, Pair{PHX_DTYPE_BF16, PHX_OP_MIN}})
      CHECK_FAILS(PHX_ERR_UNSUPPORTED, "bits of their results could differ",
                  phx_symm_all_reduce(me.symm(), 0, me.out(), 4, pair.dtype, pair.op, &options, nullptr));
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "PHX_ALGO_MULTIMEM does not serve this call; it serves all_reduce,",
                phx_symm_all_to_all(me.symm(), 0, me.out(), 4, PHX_DTYPE_F32, &options, nullptr));
    const size_t counts[3] = {1, 2, 3};
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "with one count for all",
                phx_symm_all_gather_v(me.symm(), 0, me.out(), counts, PHX_DTYPE_F32, &options, nullptr));
    std::vector<float> host(8);
    gpu::Options on_host = options;
    on_host.stream = nullptr;
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "PHX_ALGO_MULTIMEM needs symmetric memory on GPUs",
                phx_all_reduce(me.group(), host.data(), host.data(), 8, PHX_DTYPE_F32, PHX_OP_SUM, &on_host, nullptr));
    reduce(me, rank, {PHX_DTYPE_F32, PHX_OP_SUM}, 100, 0, 3);
  });
}

// Through the workspace of the group, whose memory is symmetric.
TEST(a_group_on_ordinary_memory_of_gpus_may_ask_for_switches) {
  needs_gpus(3);
  ranks::as_threads(3, [](int rank, phx_world *world) {
    if (!has_switches()) return;
    const Rank me(world, rank);
    gpu::Options options = me.options();
    options.device = gpu_of(rank);
    const size_t count = 300;
    const std::vector<Bytes> in = inputs(4, PHX_DTYPE_BF16, 3, 3 * count);
    const Bytes wanted = reference(in, 3 * count, PHX_DTYPE_BF16, PHX_OP_SUM, 3, 1);
    const int before = launches("phx_gpu_multimem_reduce_to_all_bfloat16_sum");
    me.write(me.out(), in[rank]);
    me.meet();
    CHECK_OK(phx_all_reduce(me.group(), me.out(), me.out() + 8192, 3 * count, PHX_DTYPE_BF16, PHX_OP_SUM, &options,
                            nullptr));
    expect(me.read(me.out() + 8192, 6 * count), wanted, {PHX_DTYPE_BF16, PHX_OP_SUM}, "all_reduce of a group");
    CHECK_OK(phx_reduce_scatter(me.group(), me.out(), me.out() + 8192, count, PHX_DTYPE_BF16, PHX_OP_SUM, &options,
                                nullptr));
    expect(me.read(me.out() + 8192, 2 * count), part(wanted, static_cast<size_t>(rank) * 2 * count, 2 * count),
           {PHX_DTYPE_BF16, PHX_OP_SUM}, "reduce_scatter of a group");
    if (before >= 0) CHECK(launches("phx_gpu_multimem_reduce_to_all_bfloat16_sum") >= before + 1);
    // Inputs that are read where they lie, wherever that is on each rank.
    const std::vector<Bytes> large = inputs(6, PHX_DTYPE_U8, 3, 21856);
    char *const from = rank == 0 ? me.block() + 2 : me.block() + 64;
    gpu::Options usual = options;
    usual.algo = PHX_ALGO_AUTO;
    me.write(from, large[rank]);
    const int gathers = launches("phx_gpu_multimem_all_gather");
    me.meet();
    CHECK_OK(phx_all_gather(me.group(), from, me.shared(), 21856, PHX_DTYPE_U8, &usual, nullptr));
    if (before >= 0) CHECK(launches("phx_gpu_multimem_all_gather") > gathers);
    const Bytes gathered = me.read(me.shared(), 3 * size_t{21856});
    for (size_t k = 0; k < 3; ++k) CHECK(part(gathered, k * 21856, 21856) == part(large[k], 0, 21856));
    me.meet();
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "NVLink switches cannot compute product of bfloat16",
                phx_all_reduce(me.group(), me.out(), me.out(), 8, PHX_DTYPE_BF16, PHX_OP_PROD, &options, nullptr));
    CHECK_OK(phx_all_reduce(me.group(), me.out(), me.out() + 8192, 3 * count, PHX_DTYPE_BF16, PHX_OP_SUM, &options,
                            nullptr));
    expect(me.read(me.out() + 8192, 6 * count), wanted, {PHX_DTYPE_BF16, PHX_OP_SUM}, "all_reduce after an error");
    me.meet();
  });
}

TEST(results_in_different_places_are_a_mismatch_that_stores_nothing) {
  needs_gpus(3);
  ranks::as_threads(3, [](int rank, phx_world *world) {
    if (!has_switches()) return;
    const Rank me(world, rank);
    me.write(me.shared(), Bytes(kSpace, 7));
    me.meet();
    const gpu::Options options = me.options();
    const phx_status status = phx_symm_all_reduce(me.symm(), 0, me.shared() + (rank == 2 ? 1024 : 0), 100,
                                                  PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr);
    // A rank that comes last may find that the others have their error and have left.
    CHECK(status == PHX_OK || status == PHX_ERR_MISMATCH || status == PHX_ERR_REVOKED || status == PHX_ERR_PEER_DEAD);
    CHECK(me.read(me.shared(), kSpace) == Bytes(kSpace, 7));
    phx_error_info info{};
    info.struct_size = sizeof info;
    while (phx_group_get_error(me.group(), &info) == PHX_ERR_NOT_FOUND) std::this_thread::yield();
    CHECK(info.status == PHX_ERR_MISMATCH);
  });
}

// Without multicast collectives go on as ever, and a request for it says why there is none.
void expect_none(const Rank &me, int rank, const char *why) {
  CHECK(team_of(me.symm()).multicast == nullptr);
  const gpu::Options options = me.options(), usual = me.options(PHX_ALGO_AUTO);
  CHECK_FAILS(PHX_ERR_UNSUPPORTED, "multicast is not available in group 'all': ",
              phx_symm_all_reduce(me.symm(), 0, me.block(), 4, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
  CHECK(std::strstr(phx_last_error(), why) != nullptr);
  const std::vector<Bytes> in = inputs(9, PHX_DTYPE_F32, me.size(), 500);
  me.write(me.block(), in[rank]);
  me.meet();
  CHECK_OK(phx_symm_all_reduce(me.symm(), 0, me.out(), 500, PHX_DTYPE_F32, PHX_OP_SUM, &usual, nullptr));
  CHECK(me.read(me.out(), 2000) == reference(in, 500, PHX_DTYPE_F32, PHX_OP_SUM, me.size(), 1));
  CHECK_OK(phx_symm_broadcast(me.symm(), 0, 500, PHX_DTYPE_F32, 0, &usual, nullptr));
  CHECK(me.read(me.block(), 2000) == in[0]);
  me.meet();
}

TEST(what_stands_in_the_way_is_named) {
  needs_gpus(2);
  needs_fake();
  if (!has_switches()) check::skip("a driver that knows multicast");
  ranks::as_threads(1, [](int rank, phx_world *world) { expect_none(Rank(world, 0), rank, "it has one rank"); });
  ranks::as_threads(3, [](int rank, phx_world *world) {
    expect_none(Rank(world, rank % 2), rank, "rank 0 (pid ");
    expect_none(Rank(world, rank == 0 ? 0 : 1), rank, "share a GPU, and each must have one of its own");
  });
  setenv("FAKE_CUDA_MULTICAST", "1", 1);
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const Rank me(world, rank);
    expect_none(me, rank, "the GPU of rank 1 (pid ");
    expect_none(me, rank, "cannot: it takes GPUs that NVLink switches connect");
  });
  unsetenv("FAKE_CUDA_MULTICAST");
  CHECK(gpu::alive() == 0);
}

TEST(a_driver_that_does_not_know_multicast_does_without) {
  needs_gpus(2);
  needs_fake();
  if (gpu::symbol<int()>("cuMulticastCreate") != nullptr) check::skip("a driver that does not know multicast");
  ranks::as_threads(
      2, [](int rank, phx_world *world) { expect_none(Rank(world, rank), rank, "is too old (CUDA 12.1 is needed)"); });
  CHECK(gpu::alive() == 0);
}

// Whichever rank fails, at whichever call of the driver: all do without, or all hear of the failure.
TEST(a_call_of_the_driver_that_fails_on_one_rank_is_agreed_on_and_leaves_nothing) {
  needs_gpus(2);
  needs_fake();
  if (!has_switches()) check::skip("a driver that knows multicast");
  struct Failing {
    const char *function;
    int times;        // how many of its calls, one after the other, are made to fail
    const char *why;  // of no multicast
  };
  for (const int who : {0, 1})
    for (const Failing &failing :
         {Failing{"cuMulticastCreate", 1, "cuMulticastCreate"}, Failing{"cuMulticastGetGranularity", 1, "cuMulticast"},
          Failing{"cuMulticastAddDevice", 1, "cuMulticastAddDevice"},
          Failing{"cuMulticastBindMem", 1, "cuMulticastBindMem"}, Failing{"cuMemExportToShareableHandle", 3, "cuMem"},
          Failing{"cuMemImportFromShareableHandle", 3, "cuMem"}, Failing{"cuMemAddressReserve", 4, "cuMem"},
          Failing{"cuMemMap", 4, "cuMem"}, Failing{"cuMemSetAccess", 4, "cuMem"}})
      for (int at = 1; at <= failing.times; ++at)
        ranks::all_zero(ranks::as_processes(2, [&](int rank, phx_world *world) {
          const bool fails = rank == who;
          const phx_device own = gpu_of(rank);
          phx_group *group = ranks::make_group(world);
          void *block = nullptr;
          CHECK_OK(phx_mem_alloc(world, &own, 1000, &block));
          if (fails) setenv("FAKE_CUDA_FAIL_AT", std::to_string(at).c_str(), 1);
          if (fails) setenv("FAKE_CUDA_FAIL", failing.function, 1);
          phx_symm *symm = nullptr;
          const phx_status status = phx_symm_rendezvous(group, block, 0, &symm);
          unsetenv("FAKE_CUDA_FAIL");
          uint64_t agreed[2] = {status == PHX_OK, status == PHX_OK && team_of(symm).multicast != nullptr};
          const uint64_t mine[2] = {agreed[0], agreed[1]};
          for (uint64_t &bits : agreed) {
            bits = bits != 0 ? 1 : 2;
            CHECK_OK(phx_group_agree(group, &bits, nullptr, 0));
            CHECK(bits != 0);  // all said the same
          }
          if (mine[0] != 0 && mine[1] == 0) {
            gpu::Options options;
            options.algo = PHX_ALGO_MULTIMEM;
            CHECK_FAILS(PHX_ERR_UNSUPPORTED, failing.why,
                        phx_symm_all_reduce(symm, 0, block, 4, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
            CHECK(std::strstr(phx_last_error(), ("on rank " + std::to_string(who)).c_str()) != nullptr);
          }
          phx_symm_release(symm);
          CHECK_OK(phx_mem_free(world, block));
          phx_group_release(group);
          phx_world_release(world);
          CHECK(gpu::alive() == 0);
          _exit(0);
        }));
}

// A rank may die at any step: the others' rendezvous fails, names it, and leaves nothing.
TEST(a_rank_that_dies_in_between_ends_the_rendezvous) {
  needs_gpus(3);
  needs_fake();
  if (!has_switches()) check::skip("a driver that knows multicast");
  for (const char *function : {"cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem"}) {
    const int dies = std::strcmp(function, "cuMulticastCreate") == 0 ? 0 : 1;
    const std::vector<int> codes = ranks::as_processes(3, [&](int rank, phx_world *world) {
      const phx_device own = gpu_of(rank);
      phx_group *group = ranks::make_group(world);
      void *block = nullptr;
      CHECK_OK(phx_mem_alloc(world, &own, 1000, &block));
      if (rank == dies) setenv("FAKE_CUDA_KILL", "1", 1);
      if (rank == dies) setenv("FAKE_CUDA_FAIL", function, 1);
      phx_symm *symm = nullptr;
      const std::string name = "rank " + std::to_string(dies);
      CHECK_FAILS(PHX_ERR_PEER_DEAD, name.c_str(), phx_symm_rendezvous(group, block, 0, &symm));
      CHECK(symm == nullptr);
      uint64_t bits = 1;
      CHECK_OK(phx_group_agree(group, &bits, nullptr, 0));  // nobody leaves before the others have heard of it
      CHECK_OK(phx_mem_free(world, block));
      phx_group_release(group);
      phx_world_release(world);
      CHECK(gpu::alive() == 0);
      _exit(0);
    });
    for (int rank = 0; rank < 3; ++rank) CHECK(rank == dies ? WIFSIGNALED(codes[rank]) : codes[rank] == 0);
  }
}

// Blocks come in pieces that multicast takes, and GPUs with other pieces can share memory all the same.
TEST(gpus_with_and_without_switches_share_memory) {
  needs_gpus(2);
  needs_fake();
  setenv("FAKE_CUDA_MULTICAST", "1", 1);
  for (int turn = 0; turn < 2; ++turn)
    ranks::as_threads(2, [&](int rank, phx_world *world) {
      const Rank me(world, turn == 0 ? rank : 1 - rank);
      me.write(me.block(), Bytes(kSpace, static_cast<unsigned char>(rank + 1)));
      me.meet();
      CHECK(me.read(phx_symm_buffer(me.symm(), 1 - rank), kSpace) ==
            Bytes(kSpace, static_cast<unsigned char>(2 - rank)));
      me.meet();
    });
  unsetenv("FAKE_CUDA_MULTICAST");
  CHECK(gpu::alive() == 0);
}

// A library without kernels for such GPUs has the address for kernels of the user's.
TEST(multicast_without_kernels_is_for_kernels_of_ones_own) {
  needs_gpus(2);
  needs_fake();
  if (!has_switches()) check::skip("a driver that knows multicast");
  setenv("FAKE_CUDA_LACKS", "phx_gpu_multimem_", 1);
  ranks::as_threads(2, [](int rank, phx_world *world) {
    const Rank me(world, rank);
    CHECK(team_of(me.symm()).multicast != nullptr);
    const gpu::Options options = me.options(), usual = me.options(PHX_ALGO_AUTO);
    CHECK_FAILS(PHX_ERR_UNSUPPORTED, "not every rank of group 'all' has kernels for multicast",
                phx_symm_all_reduce(me.symm(), 0, me.block(), 4, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
    me.write(me.block(), Bytes(100, static_cast<unsigned char>(rank)));
    me.meet();
    CHECK_OK(phx_symm_broadcast(me.symm(), 0, 100, PHX_DTYPE_U8, 1, &usual, nullptr));
    CHECK(me.read(me.block(), 100) == Bytes(100, 1));
    me.meet();
  });
  unsetenv("FAKE_CUDA_LACKS");
  CHECK(gpu::alive() == 0);
}

TEST(nothing_is_left_behind) {
  needs_gpus(3);
  needs_fake();
  const size_t before = gpu::open_files();
  for (int i = 0; i < 3; ++i)
    ranks::as_threads(3, [](int rank, phx_world *world) {
      reduce_each(rank, world, {{PHX_DTYPE_BF16, PHX_OP_SUM}}, {200});
    });
  CHECK(gpu::alive() == 0);
  CHECK(gpu::open_files() == before);
}

int main(int argc, char **argv) {
  setenv("FAKE_CUDA_DEVICES", "4", 0);
  setenv("FAKE_CUDA_FORKS", "1", 0);       // of tests that want it alone
  setenv("FAKE_CUDA_PROCESSORS", "2", 0);  // each of its threads is one of the system
  return check::run_all(argc, argv);
}
