// What tests of GPUs share: the driver of the host or of fake_cuda/, and copies to and from the memory of a GPU.
#pragma once

#include <dirent.h>
#include <dlfcn.h>

#include <cstdlib>
#include <vector>

#include "check.h"
#include "gpu/driver.h"

namespace gpu {

// phx_options of a call on a GPU, with what it points to.
struct Options : phx_options {
  Options() : phx_options(PHX_OPTIONS_INIT) { gpu = &on; }
  Options(const Options &other) : phx_options(other), on(other.on) { gpu = &on; }
  Options &operator=(const Options &other) {
    static_cast<phx_options &>(*this) = other;
    on = other.on;
    gpu = &on;
    return *this;
  }
  phx_gpu_options on = PHX_GPU_OPTIONS_INIT;
  void *&stream = on.stream;
  phx_device &device = on.device;
};

// A barrier of streams.
inline phx_status barrier(phx_group *group, void *stream, phx_device device, int64_t timeout_ms = 0) {
  Options options;
  options.timeout_ms = timeout_ms;
  options.stream = stream;
  options.device = device;
  return phx_barrier(group, &options, nullptr);
}

inline constexpr phx_device kGpu{PHX_DEVICE_CUDA, 0};
template <class Function>
Function *symbol(const char *name) {
  static void *const library = dlopen("libcuda.so.1", RTLD_NOW);
  return library == nullptr ? nullptr : reinterpret_cast<Function *>(dlsym(library, name));
}

// Ranks that are threads share a GPU, and their kernels wait for each other: so no stream may share a queue of the GPU
// with another one. Before the driver starts.
inline void give_streams_queues_of_their_own() { setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); }

inline void needs_driver() {
  std::string problem;
  give_streams_queues_of_their_own();
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

// Keeps the primary context of a GPU, with whose last owner streams go.
class Context {
 public:
  explicit Context(int index = 0) {
    CHECK(driver_->device_get(&device_, index) == 0 && driver_->context_retain(&context_, device_) == 0);
  }
  ~Context() { driver_->context_release(device_); }
  Context(const Context &) = delete;
  Context &operator=(const Context &) = delete;
  const phx::cuda::Driver &driver() const { return *driver_; }
  phx::cuda::Context get() const { return context_; }

 private:
  std::string problem_;
  const phx::cuda::Driver *driver_ = phx::cuda::find_driver(&problem_);
  phx::cuda::Device device_ = 0;
  phx::cuda::Context context_ = nullptr;
};

// Copies from and to the memory of a GPU, in its primary context.
class Gpu {
 public:
  explicit Gpu(int index = 0) : context_(index) { CHECK(driver().context_push(context_.get()) == 0); }
  ~Gpu() {
    phx::cuda::Context popped = nullptr;
    driver().context_pop(&popped);
  }
  const phx::cuda::Driver &driver() const { return context_.driver(); }
  void write(void *to, const std::vector<unsigned char> &bytes) const {
    auto *const copy = symbol<int(unsigned long long, const void *, size_t)>("cuMemcpyHtoD_v2");
    CHECK(copy(reinterpret_cast<uintptr_t>(to), bytes.data(), bytes.size()) == 0);
    // It returns when it has read what is to be copied; and what is on other streams does not wait for the rest.
    CHECK(driver().stream_wait(nullptr) == 0);
  }
  std::vector<unsigned char> read(const void *from, size_t size) const {
    std::vector<unsigned char> bytes(size, 1);
    auto *const copy = symbol<int(void *, unsigned long long, size_t)>("cuMemcpyDtoH_v2");
    CHECK(copy(bytes.data(), reinterpret_cast<uintptr_t>(from), size) == 0);
    return bytes;
  }

 private:
  const Context context_;
};

inline size_t open_files() {
  size_t count = 0;
  DIR *folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

}  // namespace gpu
