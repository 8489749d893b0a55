// Looks the later calls up once, in the torch that this process has loaded.
#include "optional_shim.h"

#include <dlfcn.h>

namespace phxt {
namespace {

template <class Function>
void look_up(void *torch, Function &function, const char *name) {
  function = torch ? reinterpret_cast<Function>(dlsym(torch, name)) : nullptr;
}

OptionalShim look_up_all() {
  OptionalShim shim{};
  // Already loaded: this library needs it. The handle is kept, which costs nothing, as torch is never unloaded.
  void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  look_up(torch, shim.library_def_with_tags, "torch_library_def_with_tags");
  look_up(torch, shim.tag_pt2_compliant_tag, "torch_tag_pt2_compliant_tag");
  look_up(torch, shim.tag_needs_contiguous_strides, "torch_tag_needs_contiguous_strides");
  look_up(torch, shim.exception_get_what_without_backtrace, "torch_exception_get_what_without_backtrace");
  return shim;
}

}  // namespace

const OptionalShim &optional_shim() {
  static const OptionalShim shim = look_up_all();
  return shim;
}

}  // namespace phxt
