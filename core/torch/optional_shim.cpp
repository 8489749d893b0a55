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
  look_up(torch, shim.aoti_get_current_stream, "aoti_torch_get_current_stream");
  look_up(torch, shim.aoti_delete_stream, "aoti_torch_delete_stream");
  look_up(torch, shim.stream_native_handle, "torch_stream_native_handle");
  // Loaded with torch where torch was built with it.
  void *torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  look_up(torch_cuda, shim.aoti_get_current_cuda_stream, "aoti_torch_get_current_cuda_stream");
  return shim;
}

}  // namespace

const OptionalShim &optional_shim() {
  static const OptionalShim shim = look_up_all();
  return shim;
}

}  // namespace phxt
