// The GPUs that this process has used: their contexts, and the kernels of this library as loaded on them.
#pragma once

#include <map>
#include <mutex>

#include "gpu/driver.h"
#include "phalanx/cuda.h"

namespace phx::cuda {

// Whether memory of a GPU can be part of a multicast object, and if not why.
enum class MulticastAbility : int32_t { kOldDriver = 1, kNoSwitch, kNoUnit, kCan };

// Whether memory of a GPU has fabric handles, which processes on other hosts can map, and if not why.
enum class FabricAbility : int32_t { kNone = 1, kRefused, kCan };

// A GPU that was opened. Its primary context stays until the allocator is destroyed, because making it anew takes long.
struct Gpu {
  int32_t index = 0;
  Device device = 0;
  Context context = nullptr;
  size_t unit = 0;  // the granularity of memory, in bytes
  int32_t processors = 0;
  int32_t most_threads = 0;  // of a block
  Uuid uuid{};
  std::string name;
  MulticastAbility multicast = MulticastAbility::kOldDriver;
  FabricAbility fabric = FabricAbility::kNone;
  Result fabric_refusal = 0;  // the error of the driver
};

AllocationProperties properties_of(const Gpu &gpu);
MulticastProperties multicast_properties(size_t devices, size_t size);

class Gpus {
 public:
  explicit Gpus(const Driver &driver) : driver_(driver) {}
  ~Gpus();
  const Driver &driver() const { return driver_; }

  phx_status get(const char *operation, int32_t index, Gpu *out);
  // Loads all kernels of this library, if the driver can list them. Loading a kernel may wait for everything that this
  // process runs on the GPU, even for a kernel that waits for another rank. So a rendezvous and the first message call
  // this, before any kernel is launched.
  void load(const Gpu &gpu);
  // Finds a kernel of this library (core/cuda/collectives.cu), to be launched with `threads` threads in a block.
  phx_status kernel(const char *operation, const Gpu &gpu, const std::string &name, int32_t threads, Function *out);

 private:
  struct Entry {
    Gpu gpu;
    Module module = nullptr;  // NULL: not loaded yet
    std::map<std::string, Function> loaded;
    std::map<std::string, Function> kernels;  // those whose blocks fit the GPU
  };
  phx_status open(const char *operation, int32_t index, Gpu *gpu) const;
  // Precondition: the mutex is held, and the GPU's context is current.
  phx_status open_module(const char *operation, Entry *entry) const;
  void look_at_multicast(Gpu *gpu) const;
  void look_at_fabric(Gpu *gpu) const;

  const Driver &driver_;
  std::mutex mutex_;
  std::map<int32_t, Entry> entries_;  // by index
};

// The GPUs for functions that have no world. Their contexts and kernels stay until the process ends. NULL, and *problem
// says why, if there is no driver.
Gpus *gpus_of_process(std::string *problem);

// The compiled kernels (core/cuda/collectives.cu) for cuModuleLoadData: the file that PHALANX_CUDA_KERNELS names, or
// those with which the library was built.
phx_status find_image(const char *operation, const void **image);

}  // namespace phx::cuda
