#include "gpu_driver.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>

#include "errors.h"

namespace phxt::gpu {
namespace {

struct Loaded {
  Driver driver{};
  std::string problem;  // empty: the driver can be used
};

template <class Function>
void look_up(void *library, Loaded &loaded, Function &function, const char *symbol) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (function == nullptr && loaded.problem.empty())
    loaded.problem = std::string("the CUDA driver is too old: it has no ") + symbol + " (CUDA 11.4 is needed)";
}

Loaded load() {
  Loaded loaded;
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.problem = "there is no CUDA driver (libcuda.so.1)";
    return loaded;
  }
#define PHXT_CUDA_FIND(member, symbol, parameters) look_up(library, loaded, loaded.driver.member, #symbol);
  PHXT_CUDA_FUNCTIONS(PHXT_CUDA_FIND)
#undef PHXT_CUDA_FIND
  look_up(library, loaded, loaded.driver.capture_info, "cuStreamGetCaptureInfo_v2");
  return loaded;
}

// Retained for ever, as torch retains it.
Context context_of(int32_t gpu) {
  static std::mutex mutex;
  static auto *const contexts = new std::map<int32_t, Context>;
  const std::lock_guard<std::mutex> lock(mutex);
  Context &context = (*contexts)[gpu];
  if (context == nullptr) {
    Device device = 0;
    check(driver().device_get(&device, gpu), "find the GPU (cuDeviceGet)");
    check(driver().context_retain(&context, device), "open the GPU (cuDevicePrimaryCtxRetain)");
  }
  return context;
}

}  // namespace

const Driver &driver() {
  static const Loaded loaded = load();
  if (!loaded.problem.empty()) raise(PHX_ERR_UNSUPPORTED, "a tensor is on a GPU, but " + loaded.problem);
  return loaded.driver;
}

InContext::InContext(int32_t gpu) {
  check(driver().context_push(context_of(gpu)), "use the GPU (cuCtxPushCurrent)");
  driver().capture_mode(&mode_);
}

InContext::~InContext() {
  Context popped = nullptr;
  driver().capture_mode(&mode_);
  driver().context_pop(&popped);
}

void check(Result result, const char *doing) {
  if (result != 0)
    raise(PHX_ERR_DEVICE,
          std::string("phalanx could not ") + doing + ": the CUDA driver returned error " + std::to_string(result));
}

}  // namespace phxt::gpu
