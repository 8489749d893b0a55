// Memory of GPUs that ranks share: on the driver of the host, or on the one of fake_cuda/ (CTest gives that one).
#include <cstring>
#include <vector>

#include "check.h"
#include "gpu.h"
#include "ranks.h"

using gpu::alive;
using gpu::Gpu;
using gpu::kGpu;
using gpu::needs_driver;
using gpu::open_files;

namespace {

constexpr size_t kBytes = 100000;

std::vector<unsigned char> pattern(int rank) {
  std::vector<unsigned char> bytes(kBytes);
  for (size_t i = 0; i < kBytes; ++i) bytes[i] = static_cast<unsigned char>(i * 7 + static_cast<size_t>(rank) * 31 + 1);
  return bytes;
}

// Every rank writes its block, and reads everybody's where they are mapped here.  C2
void share(int rank, phx_world *world) {
  phx_group *group = ranks::make_group(world);
  void *mine = nullptr;
  CHECK_OK(phx_mem_alloc(world, &kGpu, kBytes, &mine));
  const Gpu gpu;
  CHECK(gpu.read(mine, kBytes) == std::vector<unsigned char>(kBytes, 0));  // zeroed, as all memory of ours
  gpu.write(mine, pattern(rank));
  phx_symm *symm = nullptr;
  CHECK_OK(phx_symm_rendezvous(group, mine, 0, &symm));
  phx_symm_info info{};
  info.struct_size = sizeof info;
  CHECK_OK(phx_symm_get_info(symm, &info));
  CHECK(info.device.type == PHX_DEVICE_CUDA && info.size == kBytes && info.base == mine);
  for (int peer = 0; peer < phx_world_size(world); ++peer)
    CHECK(gpu.read(phx_symm_buffer(symm, peer), kBytes) == pattern(peer));
  CHECK_OK(phx_symm_barrier(symm, 0, 0));
  // Writes go the other way round.
  const int next = (rank + 1) % phx_world_size(world);
  gpu.write(phx_symm_buffer(symm, next), pattern(rank + 10));
  CHECK_OK(phx_symm_barrier(symm, 0, 0));
  const int previous = (rank + phx_world_size(world) - 1) % phx_world_size(world);
  CHECK(gpu.read(mine, kBytes) == pattern(previous + 10));
  CHECK_OK(phx_symm_barrier(symm, 0, 0));
  // In any order: a peer may still look at a block that its owner has freed.
  if (rank == 0) CHECK_OK(phx_mem_free(world, mine));
  CHECK_OK(phx_barrier(group, nullptr, nullptr));
  if (rank != 0) CHECK(gpu.read(phx_symm_buffer(symm, 0), kBytes) == pattern(phx_world_size(world) - 1 + 10));
  phx_symm_release(symm);
  if (rank != 0) CHECK_OK(phx_mem_free(world, mine));
  phx_group_release(group);
}

TEST(ranks_as_processes_share_memory_of_a_gpu) {
  // A forked child must find a driver that was not started before.
  if (gpu::symbol<int()>("cuInit") == nullptr) check::skip("libcuda.so.1");
  ranks::all_zero(ranks::as_processes(3, share));
}

TEST(ranks_as_threads_share_memory_of_a_gpu) {
  needs_driver();
  ranks::as_threads(2, share);
}

TEST(nothing_is_left_behind) {
  needs_driver();
  if (alive() < 0) check::skip("the fake driver, which counts");
  ranks::as_threads(1, [](int, phx_world *world) {  // what is made once
    void *memory = nullptr;
    CHECK_OK(phx_mem_alloc(world, &kGpu, 1, &memory));
    CHECK_OK(phx_mem_free(world, memory));
  });
  CHECK(alive() == 0);
  const size_t before = open_files();
  for (int i = 0; i < 5; ++i) ranks::as_threads(2, share);
  CHECK(alive() == 0);
  CHECK(open_files() == before);
}

TEST(a_call_of_the_driver_that_fails_is_named_and_leaves_nothing) {
  needs_driver();
  if (alive() < 0) check::skip("the fake driver, which fails on demand");
  struct Failing {
    const char *function;
    const char *words;
  };
  for (const Failing failing :
       {Failing{"cuDeviceGetCount", "counting the GPUs"}, Failing{"cuMemCreate", "cuMemCreate"},
        Failing{"cuDevicePrimaryCtxRetain", "opening the GPU"}, Failing{"cuMemAddressReserve", "reserving addresses"},
        Failing{"cuMemMap", "mapping the memory"}, Failing{"cuMemSetAccess", "access"},
        Failing{"cuMemsetD8Async", "zeros"}, Failing{"cuStreamCreate", "zeros"}}) {
    ranks::as_threads(1, [&](int, phx_world *world) {
      void *memory = nullptr;
      setenv("FAKE_CUDA_FAIL", failing.function, 1);
      const phx_status status = phx_mem_alloc(world, &kGpu, kBytes, &memory);
      unsetenv("FAKE_CUDA_FAIL");
      CHECK(status == PHX_ERR_DEVICE && memory == nullptr);
      CHECK(std::strstr(phx_last_error(), failing.words) != nullptr);
      CHECK(std::strstr(phx_last_error(), "CUDA_ERROR_UNKNOWN") != nullptr);
    });
    CHECK(alive() == 0);
  }
  // In a rendezvous every rank hears of it.
  setenv("FAKE_CUDA_FORKS", "1", 1);
  for (const char *function : {"cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"}) {
    ranks::all_zero(ranks::as_processes(2, [&](int rank, phx_world *world) {
      phx_group *group = ranks::make_group(world);
      void *memory = nullptr;
      CHECK_OK(phx_mem_alloc(world, &kGpu, kBytes, &memory));
      if (rank == 1) setenv("FAKE_CUDA_FAIL", function, 1);
      phx_symm *symm = nullptr;
      CHECK(phx_symm_rendezvous(group, memory, 0, &symm) != PHX_OK && symm == nullptr);
      if (rank == 1) CHECK(std::strstr(phx_last_error(), function) != nullptr);
      unsetenv("FAKE_CUDA_FAIL");
      CHECK_OK(phx_mem_free(world, memory));
      phx_group_release(group);
    }));
  }
}

TEST(wrong_requests_say_so) {
  needs_driver();
  ranks::as_threads(1, [](int, phx_world *world) {
    void *memory = nullptr;
    const phx_device nowhere{PHX_DEVICE_CUDA, 99};
    CHECK_FAILS(PHX_ERR_INVALID, "there is no CUDA device 99", phx_mem_alloc(world, &nowhere, 1, &memory));
    const phx_device before{PHX_DEVICE_CUDA, -1};
    CHECK_FAILS(PHX_ERR_INVALID, "there is no CUDA device -1", phx_mem_alloc(world, &before, 1, &memory));
    CHECK_FAILS(PHX_ERR_NO_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", phx_mem_alloc(world, &kGpu, size_t{1} << 44, &memory));
    CHECK_OK(phx_mem_alloc(world, &kGpu, 0, &memory));  // no bytes are allowed, and a block of their own
    phx_group *group = ranks::make_group(world);
    phx_symm *symm = nullptr;
    CHECK_OK(phx_symm_rendezvous(group, memory, 0, &symm));
    phx_symm_release(symm);
    if (phx_has("cuda") == 0 && std::getenv("PHALANX_CUDA_KERNELS") == nullptr) {
      CHECK_OK(phx_symm_alloc(group, &kGpu, 64, 0, &symm));
      CHECK_FAILS(
          PHX_ERR_UNSUPPORTED, "built without kernels for GPUs",
          phx_symm_all_reduce(symm, 0, phx_symm_buffer(symm, 0), 1, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));
      phx_symm_release(symm);
    }
    CHECK_OK(phx_mem_free(world, memory));
    phx_group_release(group);
  });
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
