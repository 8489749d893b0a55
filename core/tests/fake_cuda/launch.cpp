// The driver without a GPU: which kernels there are, and their launches.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "fake_cuda/multicast.h"
#include "fake_cuda/state.h"

using namespace fake_cuda;
using namespace phx::cuda;

namespace {

// Whether a kernel that stores to `multicast` would reach the blocks of all ranks, and nothing else.
bool reaches_all(State &s, const phx_team &team) {
  const auto found = s.mapped.find(reinterpret_cast<uintptr_t>(team.multicast));
  if (found == s.mapped.end() || !found->second.accessible) return false;
  const Physical &object = s.physical.at(found->second.handle);
  size_t offset = 0;
  const size_t size = static_cast<size_t>(team.group_size) * sizeof(void *);
  const Physical *const list = behind(s, reinterpret_cast<uintptr_t>(team.buffers), size, &offset);
  if (!object.multicast || list == nullptr) return false;
  std::vector<Pointer> buffers(static_cast<size_t>(team.group_size));
  if (pread(list->fd, buffers.data(), size, static_cast<off_t>(offset)) != static_cast<ssize_t>(size)) return false;
  std::set<ino_t> blocks;
  for (const Pointer buffer : buffers) {
    const Physical *const memory = behind(s, buffer, team.bytes, &offset);
    if (memory == nullptr || offset != 0) return false;
    blocks.insert(number_of(memory->fd));
  }
  return Switch::of(object.fd)->bound() == blocks && team.bytes <= object.size;
}

// A kernel has been put on a stream, or has ended.
void count_ahead(Device device, int change) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.ahead[device] += change;
  s.ended.notify_all();
}
bool lacks(const char *kernel) {
  const char *const prefix = std::getenv("FAKE_CUDA_LACKS");
  return prefix != nullptr && std::strncmp(kernel, prefix, std::strlen(prefix)) == 0;
}
// In the current context.
void load(const void *kernel) {
  State &s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  const Device device = current_device();
  if (s.loaded[device].count(kernel) != 0) return;
  s.ended.wait(lock, [&] { return s.running[device] == 0 && s.ahead[device] == 0; });
  s.loaded[device].insert(kernel);
}

}  // namespace

// The image is not looked at: the kernels are in this library.
FAKE(cuModuleLoadData, (Module * module, const void *image)) {
  MAY_FAIL(cuModuleLoadData);
  if (is_captured_out(s)) return kCaptureUnsupported;
  if (current_contexts().empty()) return kInvalidContext;
  if (image == nullptr) return kInvalidValue;
  ++s.modules;
  *module = reinterpret_cast<Module>(static_cast<intptr_t>(1));
  return kOk;
}
FAKE(cuModuleUnload, (Module)) {
  MAY_FAIL(cuModuleUnload);
  --s.modules;
  return !current_contexts().empty() ? kOk : kInvalidContext;
}
FAKE(cuModuleGetFunction, (Function * function, Module, const char *name)) {
  const void *kernel = nullptr;
  {
    MAY_FAIL(cuModuleGetFunction);
    if (current_contexts().empty()) return kInvalidContext;
    kernel = lacks(name) ? nullptr : find_kernel(name);
  }
  *function = reinterpret_cast<Function>(const_cast<void *>(kernel));
  if (kernel == nullptr) return kNotFound;
  load(kernel);
  return kOk;
}
#ifndef FAKE_CUDA_OLD
static std::vector<const char *> kernels() {  // of the image
  std::vector<const char *> names = kernel_names();
  names.erase(std::remove_if(names.begin(), names.end(), lacks), names.end());
  return names;
}
FAKE(cuModuleGetFunctionCount, (unsigned *count, Module)) {
  MAY_FAIL(cuModuleGetFunctionCount);
  *count = static_cast<unsigned>(kernels().size());
  return kOk;
}
FAKE(cuModuleEnumerateFunctions, (Function * functions, unsigned count, Module)) {
  MAY_FAIL(cuModuleEnumerateFunctions);
  const std::vector<const char *> names = kernels();
  if (count > names.size()) return kInvalidValue;
  for (unsigned i = 0; i < count; ++i)
    functions[i] = reinterpret_cast<Function>(const_cast<void *>(find_kernel(names[i])));
  return kOk;
}
FAKE(cuFuncGetName, (const char **name, Function function)) {
  MAY_FAIL(cuFuncGetName);
  *name = name_of(function);
  return *name != nullptr ? kOk : kInvalidHandle;
}
FAKE(cuFuncLoad, (Function function)) {
  {
    MAY_FAIL(cuFuncLoad);
    if (current_contexts().empty()) return kInvalidContext;
  }
  load(function);
  return kOk;
}
#endif
FAKE(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *blocks, Function, int, size_t)) {
  MAY_FAIL(cuOccupancyMaxActiveBlocksPerMultiprocessor);
  *blocks = std::getenv("FAKE_CUDA_NO_ROOM") != nullptr ? 0 : 1;
  return kOk;
}
FAKE(cuLaunchKernel,
     (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
      unsigned block_z, unsigned shared, Stream stream, void **parameters, void **extra)) {
  MAY_FAIL(cuLaunchKernel);
  if (current_contexts().empty()) return kInvalidContext;
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > 4 || block_y != 1 || block_z != 1 ||
      shared != 0 || extra != nullptr)
    return kInvalidValue;
  if (is_gone(s, stream)) return kInvalidHandle;
  ++s.launches[function];
  s.blocks[function] = static_cast<int>(grid_x);
  const Device device = current_device();
  Processors &processors = s.processors[device];
  const int ahead = stream_of(stream).capturing() ? 0 : 1;
  const auto put = [&](auto what) {  // `what` runs when the stream comes to it
    s.ahead[device] += ahead;
    stream_of(stream).put([=] {
      count_running(device, 1);
      what();
      count_running(device, -1);
      count_ahead(device, -ahead);
    });
    return kOk;
  };
  if (is_random(function))
    return put([=, &processors, fill = *static_cast<const phx::random::DeviceFill *>(parameters[0])] {
      run(function, fill, grid_x, block_x, processors);
    });
  if (is_of_messages(function))
    return put([=, &processors, exchange = *static_cast<const Exchange *>(parameters[0])] {
      run(function, exchange, grid_x, block_x, processors);
    });
  const Launch launch = *static_cast<const Launch *>(parameters[0]);
  for (const phx_team *team : {&launch.team, &launch.spread.team})
    if (team->multicast != nullptr && !reaches_all(s, *team)) return kInvalidValue;
  const bool takes_lists = parameters[1] != nullptr;
  const phx::cuda::Lists lists =
      takes_lists ? *static_cast<const phx::cuda::Lists *>(parameters[1]) : phx::cuda::Lists{};
  return put([=, &processors] { run(function, launch, takes_lists ? &lists : nullptr, grid_x, block_x, processors); });
}
// How often a kernel has been launched in this process.
FAKE(fake_cuda_launches, (const char *name)) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  return s.launches[find_kernel(name)];
}
// How many blocks the last launch of a kernel had.
FAKE(fake_cuda_blocks, (const char *name)) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  return s.blocks[find_kernel(name)];
}
