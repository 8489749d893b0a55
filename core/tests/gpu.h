// What tests of GPUs share: the driver of the host or of fake_cuda/, and copies to and from the memory of a GPU.
#pragma once

#include <dirent.h>
#include <dlfcn.h>

#include <cstdlib>
#include <vector>

#include "check.h"
#include "cuda/driver.h"

namespace gpu {

inline constexpr phx_device kGpu{PHX_DEV_CUDA, 0};
template <class Function>
Function *symbol(const char *name) {
  static void *const library = dlopen("libcuda.so.1", RTLD_NOW);
  return library == nullptr ? nullptr : reinterpret_cast<Function *>(dlsym(library, name));
}

inline void needs_driver() {
  std::string problem;
  if (phx::cuda::find_driver(&problem) == nullptr) check::skip(problem.c_str());
}
// What the fake driver has handed out; -1 where a real one is.
inline int alive() {
  auto *const count = symbol<int()>("fake_cuda_alive");
  return count != nullptr ? count() : -1;
}

// How many GPUs there are, without starting the driver, which a process that forks must not do.
inline int count() {
  if (symbol<int()>("fake_cuda_alive") != nullptr) {
    const char *given = std::getenv("FAKE_CUDA_DEVICES");
    return given != nullptr ? std::atoi(given) : 2;
  }
  int count = 0;
  DIR *folder = opendir("/proc/driver/nvidia/gpus");
  for (const dirent *entry = nullptr; folder != nullptr && (entry = readdir(folder)) != nullptr;)
    if (entry->d_name[0] != '.') ++count;
  if (folder != nullptr) closedir(folder);
  return count;
}

// Copies from and to the memory of a GPU, in its primary context.
class Gpu {
 public:
  explicit Gpu(int index = 0) {
    CHECK(driver_->device_get(&device_, index) == 0 && driver_->context_retain(&context_, device_) == 0);
    CHECK(driver_->context_push(context_) == 0);
  }
  ~Gpu() {
    phx::cuda::Context popped = nullptr;
    driver_->context_pop(&popped);
    driver_->context_release(device_);
  }
  const phx::cuda::Driver &driver() const { return *driver_; }
  void write(void *to, const std::vector<unsigned char> &bytes) const {
    auto *const copy = symbol<int(unsigned long long, const void *, size_t)>("cuMemcpyHtoD_v2");
    CHECK(copy(reinterpret_cast<uintptr_t>(to), bytes.data(), bytes.size()) == 0);
  }
  std::vector<unsigned char> read(const void *from, size_t size) const {
    std::vector<unsigned char> bytes(size, 1);
    auto *const copy = symbol<int(void *, unsigned long long, size_t)>("cuMemcpyDtoH_v2");
    CHECK(copy(bytes.data(), reinterpret_cast<uintptr_t>(from), size) == 0);
    return bytes;
  }

 private:
  std::string problem_;
  const phx::cuda::Driver *driver_ = phx::cuda::find_driver(&problem_);
  phx::cuda::Device device_ = 0;
  phx::cuda::Context context_ = nullptr;
};

inline size_t open_files() {
  size_t count = 0;
  DIR *folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

}  // namespace gpu
