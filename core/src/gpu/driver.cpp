#include "gpu/driver.h"

#include <dlfcn.h>

#include "base/error.h"

namespace phx::cuda {
namespace {

struct Loaded {
  Driver driver{};
  std::string problem;  // empty: the driver can be used
};

// The library stays loaded: the driver does not survive being unloaded.
Loaded load() {
  Loaded loaded;
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.problem = "there is no CUDA driver (libcuda.so.1)";
    return loaded;
  }
// NOLINTBEGIN(bugprone-macro-parentheses): a list of parameters, and a name
#define PHX_CUDA_FIND(member, symbol, parameters)                                         \
  loaded.driver.member = reinterpret_cast<Result(*) parameters>(dlsym(library, #symbol)); \
  if (loaded.driver.member == nullptr && loaded.problem.empty())                          \
    loaded.problem = "the CUDA driver is too old: it has no " #symbol " (CUDA 11.4 is needed)";
  PHX_CUDA_FUNCTIONS(PHX_CUDA_FIND)
#undef PHX_CUDA_FIND
#define PHX_CUDA_LOOK(member, symbol, parameters) \
  loaded.driver.member = reinterpret_cast<Result(*) parameters>(dlsym(library, #symbol));
  PHX_CUDA_NEWER_FUNCTIONS(PHX_CUDA_LOOK)
#undef PHX_CUDA_LOOK
  // NOLINTEND(bugprone-macro-parentheses)
  if (!loaded.problem.empty()) return loaded;
  const Result result = loaded.driver.init(0);
  if (result == 0) return loaded;
  const char *name = nullptr;
  loaded.driver.get_error_name(result, &name);
  loaded.problem = std::string("the CUDA driver does not start: ") + (name != nullptr ? name : "unknown error");
  return loaded;
}

}  // namespace

const Driver *find_driver(std::string *problem) {
  static const Loaded loaded = load();
  if (loaded.problem.empty()) return &loaded.driver;
  *problem = loaded.problem;
  return nullptr;
}

phx_status failed(const Driver &driver, const char *operation, Result result, const char *action) {
  const char *name = nullptr;
  driver.get_error_name(result, &name);
  return fail(result == kOutOfMemory ? PHX_ERR_NO_MEMORY : PHX_ERR_DEVICE, operation, "%s failed: %s", action,
              name != nullptr ? name : "unknown error");
}

}  // namespace phx::cuda
