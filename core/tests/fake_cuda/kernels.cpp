#include "fake_cuda/kernels.h"

#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "host_blocks.h"

#define __global__ __attribute__((visibility("default")))
#include "../../cuda/collectives.cu"

namespace fake_cuda {

const void *find_kernel(const char *name) {
  Dl_info here;
  if (dladdr(reinterpret_cast<const void *>(&find_kernel), &here) == 0) return nullptr;
  void *const self = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  const void *const kernel = self == nullptr ? nullptr : dlsym(self, name);
  if (self != nullptr) dlclose(self);
  return kernel;
}

bool is_random(const void *kernel) {
  Dl_info found;
  return dladdr(kernel, &found) != 0 && found.dli_sname != nullptr &&
         std::strncmp(found.dli_sname, "phx_gpu_random_", std::strlen("phx_gpu_random_")) == 0;
}

bool is_of_messages(const void *kernel) { return kernel == reinterpret_cast<const void *>(&phx_gpu_messages); }

namespace {

// `body` on each thread of each block.
void run_blocks(uint32_t blocks, uint32_t threads, Processors &processors, const std::function<void()> &body) {
  std::vector<std::unique_ptr<host_blocks::Block>> all;
  std::vector<std::thread> owners;
  for (uint32_t number = 0; number < blocks; ++number) {
    all.push_back(std::make_unique<host_blocks::Block>(number, blocks, threads));
    processors.take();
    owners.emplace_back([&, block = all.back().get()] {
      std::vector<std::thread> running;
      for (uint32_t thread = 0; thread < threads; ++thread)
        running.emplace_back([&, block, thread] {
          host_blocks::here = {block, thread};
          body();
        });
      for (std::thread &one : running) one.join();
      processors.give();
    });
  }
  for (std::thread &one : owners) one.join();
}

template <class... Parameters>
auto function_of(const void *kernel) {
  return reinterpret_cast<void (*)(Parameters...)>(const_cast<void *>(kernel));
}

}  // namespace

void run(const void *kernel, const phx::cuda::Launch &launch, const phx::cuda::Lists *lists, uint32_t blocks,
         uint32_t threads, Processors &processors) {
  run_blocks(blocks, threads, processors, [&] {
    if (lists == nullptr)
      function_of<Launch>(kernel)(launch);
    else
      function_of<Launch, Lists>(kernel)(launch, *lists);
  });
}

void run(const void *kernel, const phx::random::DeviceFill &fill, uint32_t blocks, uint32_t threads,
         Processors &processors) {
  run_blocks(blocks, threads, processors, [&] { function_of<phx::random::DeviceFill>(kernel)(fill); });
}

void run(const void *kernel, const phx::cuda::Exchange &exchange, uint32_t blocks, uint32_t threads,
         Processors &processors) {
  run_blocks(blocks, threads, processors, [&] { function_of<phx::cuda::Exchange>(kernel)(exchange); });
}

}  // namespace fake_cuda
