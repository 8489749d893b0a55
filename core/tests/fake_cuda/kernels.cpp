#include "fake_cuda/kernels.h"

#include <dlfcn.h>
#include <elf.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
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

// In the table of symbols of this library's file.
std::vector<const char *> kernel_names() {
  static const std::string file = [] {
    Dl_info here;
    dladdr(reinterpret_cast<const void *>(&find_kernel), &here);
    std::ifstream opened(here.dli_fname, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(opened), {});
  }();
  std::vector<const char *> names;
  const auto *const head = reinterpret_cast<const Elf64_Ehdr *>(file.data());
  const auto *const sections = reinterpret_cast<const Elf64_Shdr *>(file.data() + head->e_shoff);
  for (int i = 0; i < head->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_DYNSYM) continue;
    const char *const texts = file.data() + sections[sections[i].sh_link].sh_offset;
    const auto *const symbols = reinterpret_cast<const Elf64_Sym *>(file.data() + sections[i].sh_offset);
    for (size_t k = 0; k < sections[i].sh_size / sizeof *symbols; ++k)
      if (std::strncmp(texts + symbols[k].st_name, "phx_gpu_", 8) == 0) names.push_back(texts + symbols[k].st_name);
  }
  return names;
}

const char *name_of(const void *kernel) {
  Dl_info found;
  return dladdr(kernel, &found) != 0 && found.dli_saddr == kernel ? found.dli_sname : nullptr;
}

bool is_random(const void *kernel) {
  const char *const name = name_of(kernel);
  return name != nullptr && std::strncmp(name, "phx_gpu_random_", std::strlen("phx_gpu_random_")) == 0;
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
