// Collectives of a group on ordinary memory of GPUs give what they give on the host: on the driver of the host, or on
// the one of fake_cuda/ (CTest gives that one).
#include "gpu_group.h"

using namespace gpu_group;

namespace {

void each_collective(phx_world *world, const std::vector<int32_t> &dtypes, const std::vector<size_t> &counts) {
  const Rank me(world);
  int seed = 50;
  for (const int32_t dtype : dtypes)
    for (const size_t count : counts)
      for (const bool in_place : {false, true})
        for (const Collective &one : collectives(me.size(), me.self(), count, dtype, PHX_OP_SUM, me.size() - 1))
          expect_as_on_host(me, one, dtype, count % 3, in_place, ++seed);
}

}  // namespace

TEST(ranks_as_processes_get_what_the_host_gives) {
  if (gpu::symbol<int()>("cuInit") == nullptr) check::skip("libcuda.so.1");
  ranks::all_zero(ranks::as_processes(3, [](int, phx_world *world) {
    each_collective(world, {PHX_DTYPE_F32, PHX_DTYPE_BF16, PHX_DTYPE_I8, PHX_DTYPE_C128}, {0, 1, 133, 800});
  }));
}

TEST(ranks_as_threads_get_what_the_host_gives) {
  gpu::needs_driver();
  for (const int n : {1, 2, 4})
    ranks::as_threads(n, [](int, phx_world *world) {
      each_collective(world, {PHX_DTYPE_F32, PHX_DTYPE_F8E5M2, PHX_DTYPE_BOOL}, {5, 700});
    });
}

// What is summed in two steps, in the workspace.
TEST(large_all_reduces_of_many_ranks_get_the_bits_of_the_host) {
  gpu::needs_driver();
  ranks::as_threads(3, [](int, phx_world *world) {
    const Rank me(world, size_t{1} << 20);
    const size_t count = 150001;
    for (const int32_t op : {PHX_OP_SUM, PHX_OP_AVG, PHX_OP_PREMUL_SUM})
      for (const bool in_place : {false, true})
        expect_as_on_host(me, collectives(3, me.self(), count, PHX_DTYPE_BF16, op, 0)[0], PHX_DTYPE_BF16, 0, in_place,
                          7);
  });
}

// The slots are small, so that what is sent takes many rounds.
TEST(ragged_exchanges_go_in_rounds) {
  gpu::needs_driver();
  ranks::Options options;
  options.staging_bytes = 256;
  for (const int n : {2, 3})
    ranks::as_threads(
        n,
        [&](int, phx_world *world) {
          const Rank me(world);
          for (const size_t count : {size_t{0}, size_t{1}, size_t{17}, size_t{1000}, size_t{9000}})
            expect_as_on_host(me, collectives(n, me.self(), count, PHX_DTYPE_U16, PHX_OP_SUM, 0)[6], PHX_DTYPE_U16,
                              count % 2, false, 3);
        },
        options);
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
