#include "gpu/gpu.h"

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "base/shared_memory.h"

namespace phx::cuda {

AllocationProperties properties_of(const Gpu &gpu) {
  AllocationProperties properties{};
  properties.type = kPinned;
  properties.handle_types = gpu.fabric == FabricAbility::kCan ? kFileDescriptor | kFabric : kFileDescriptor;
  properties.location = {kOnDevice, gpu.device};
  return properties;
}

MulticastProperties multicast_properties(size_t devices, size_t size) {
  MulticastProperties properties{};
  properties.devices = static_cast<unsigned>(devices);
  properties.size = size;
  properties.handle_types = kFileDescriptor;
  return properties;
}

Gpus::~Gpus() {
  for (const auto &[index, entry] : entries_) {
    if (entry.module != nullptr) {
      const Current current(driver_, entry.gpu.context);
      driver_.module_unload(entry.module);
    }
    driver_.context_release(entry.gpu.device);
  }
}

phx_status Gpus::get(const char *operation, int32_t index, Gpu *out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto it = entries_.find(index);
  if (it == entries_.end()) {
    Entry entry;
    PHX_TRY(open(operation, index, &entry.gpu));
    it = entries_.emplace(index, std::move(entry)).first;
  }
  *out = it->second.gpu;
  return PHX_OK;
}

phx_status Gpus::open(const char *operation, int32_t index, Gpu *gpu) const {
  const auto check = [&](Result result, const char *action) -> phx_status {
    return result == 0 ? PHX_OK : failed(driver_, operation, result, action);
  };
  int count = 0;
  PHX_TRY(check(driver_.device_count(&count), "counting the GPUs (cuDeviceGetCount)"));
  if (index < 0 || index >= count)
    return fail(PHX_ERR_INVALID, operation,
                "there is no CUDA device %d; this process sees %d devices, numbered from 0 (CUDA_VISIBLE_DEVICES)",
                index, count);
  gpu->index = index;
  PHX_TRY(check(driver_.device_get(&gpu->device, index), "finding the GPU (cuDeviceGet)"));
  for (const int needed : {kHasVirtualMemory, kHasFileDescriptors}) {
    int has = 0;
    if (driver_.device_attribute(&has, needed, gpu->device) != 0 || has == 0)
      return fail(PHX_ERR_UNSUPPORTED, operation, "CUDA device %d cannot share its memory: no %s", index,
                  needed == kHasVirtualMemory ? "virtual memory management" : "handles that are descriptors");
  }
  const char *const asking = "asking what the GPU has (cuDeviceGetAttribute)";
  PHX_TRY(check(driver_.device_attribute(&gpu->processors, kProcessors, gpu->device), asking));
  PHX_TRY(check(driver_.device_attribute(&gpu->most_threads, kMostThreads, gpu->device), asking));
  PHX_TRY(check(driver_.device_uuid(&gpu->uuid, gpu->device), "asking which GPU it is (cuDeviceGetUuid)"));
  char name[256] = {};
  PHX_TRY(check(driver_.device_name(name, static_cast<int>(sizeof name - 1), gpu->device),
                "asking for the GPU's name (cuDeviceGetName)"));
  gpu->name = name;
  PHX_TRY(check(driver_.context_retain(&gpu->context, gpu->device), "opening the GPU (cuDevicePrimaryCtxRetain)"));
  look_at_fabric(gpu);
  const AllocationProperties properties = properties_of(*gpu);
  const Result result = driver_.granularity(&gpu->unit, &properties, kSmallestGranularity);
  if (result != 0) {
    driver_.context_release(gpu->device);
    return failed(driver_, operation, result, "asking for the granularity of memory (cuMemGetAllocationGranularity)");
  }
  look_at_multicast(gpu);
  return PHX_OK;
}

// A GPU with fabric handles cannot make them without a service of the host (nvidia-imex) and the right to a channel of
// it. Only an attempt shows whether these exist, so this allocates, exports and frees one piece of memory.
void Gpus::look_at_fabric(Gpu *gpu) const {
  int has = 0;
  if (driver_.device_attribute(&has, kHasFabric, gpu->device) != 0 || has == 0) return;
  const Current current(driver_, gpu->context);
  gpu->fabric = FabricAbility::kCan;
  const AllocationProperties properties = properties_of(*gpu);
  size_t unit = 0;
  Handle handle = 0;
  FabricHandle out{};
  Result result = current.result();
  if (result == 0) result = driver_.granularity(&unit, &properties, kSmallestGranularity);
  if (result == 0) result = driver_.create(&handle, unit, &properties, 0);
  if (result == 0) {
    result = driver_.export_handle(&out, handle, kFabric, 0);
    driver_.release(handle);
  }
  if (result == 0) return;
  gpu->fabric = FabricAbility::kRefused;
  gpu->fabric_refusal = result;
}

// Makes the granularity of memory such that a multicast object can take every block, whatever the group is going to be.
// A GPU that cannot do multicast is used without it.
void Gpus::look_at_multicast(Gpu *gpu) const {
  if (!driver_.knows_multicast()) return;
  int has = 0;
  gpu->multicast = MulticastAbility::kNoSwitch;
  if (driver_.device_attribute(&has, kHasMulticast, gpu->device) != 0 || has == 0) return;
  size_t unit = 0;
  const MulticastProperties properties = multicast_properties(2, gpu->unit);
  gpu->multicast = MulticastAbility::kNoUnit;
  if (driver_.multicast_granularity(&unit, &properties, kSmallestGranularity) != 0 || unit == 0) return;
  gpu->multicast = MulticastAbility::kCan;
  gpu->unit = round_up(std::max(gpu->unit, unit), std::min(gpu->unit, unit));  // both are powers of two
}

phx_status Gpus::open_module(const char *operation, Entry *entry) const {
  if (entry->module != nullptr) return PHX_OK;
  const void *image = nullptr;
  PHX_TRY(find_image(operation, &image));
  const Result result = driver_.module_load(&entry->module, image);
  if (result == 0) return PHX_OK;
  entry->module = nullptr;
  return failed(driver_, operation, result, "loading the kernels (cuModuleLoadData)");
}

// Ignores errors, because memory can be shared without kernels. The launch of a kernel tries again what failed here,
// and reports the error.
void Gpus::load(const Gpu &gpu) {
  if (!driver_.lists_functions()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry &entry = entries_.at(gpu.index);
  if (!entry.loaded.empty()) return;
  const KeptError kept;
  const Current current(driver_, gpu.context);
  unsigned count = 0;
  std::vector<Function> all;
  if (current.result() == 0 && open_module("symm_rendezvous", &entry) == PHX_OK &&
      driver_.function_count(&count, entry.module) == 0) {
    all.resize(count);
    if (driver_.functions(all.data(), count, entry.module) != 0) all.clear();
  }
  for (const Function function : all) {
    const char *name = nullptr;
    if (driver_.function_load(function) == 0 && driver_.function_name(&name, function) == 0)
      entry.loaded.emplace(name, function);
  }
}

phx_status Gpus::kernel(const char *operation, const Gpu &gpu, const std::string &name, int32_t threads,
                        Function *out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry &entry = entries_.at(gpu.index);
  const auto checked = entry.kernels.find(name);
  if (checked != entry.kernels.end()) {
    *out = checked->second;
    return PHX_OK;
  }
  const Current current(driver_, gpu.context);
  Result result = current.result();
  if (result != 0) return failed(driver_, operation, result, "loading the kernels (cuModuleLoadData)");
  PHX_TRY(open_module(operation, &entry));
  const auto loaded = entry.loaded.find(name);
  if (loaded != entry.loaded.end())
    *out = loaded->second;
  else
    result = driver_.module_function(out, entry.module, name.c_str());
  if (result != 0) return failed(driver_, operation, result, ("finding the kernel " + name).c_str());
  // All blocks of a launch must be resident at once, and a launch has at most one block for each processor.
  int fitting = 0;
  result = driver_.occupancy(&fitting, *out, threads, 0);
  if (result != 0)
    return failed(driver_, operation, result,
                  "asking how many blocks fit (cuOccupancyMaxActiveBlocksPerMultiprocessor)");
  if (fitting < 1)
    return fail(PHX_ERR_UNSUPPORTED, operation, "a block of %d threads of %s does not fit this GPU", threads,
                name.c_str());
  entry.kernels.emplace(name, *out);
  return PHX_OK;
}

// Never destroyed: the driver may shut down before static objects are destroyed.
Gpus *gpus_of_process(std::string *problem) {
  const Driver *driver = find_driver(problem);
  if (driver == nullptr) return nullptr;
  static Gpus *const gpus = new Gpus(*driver);
  return gpus;
}

}  // namespace phx::cuda
