// Registers the ops when the library is loaded, so that torch.ops.load_library, dlopen and AOTInductor packages all
// work.
#include <cstring>
#include <string>

#include "call.h"
#include "library.h"
#include "optional_shim.h"
#include "phalanx_torch.h"

namespace phxt {
namespace {

struct Op {
  const char *name;
  const char *arguments;  // and result: the schema without its name
  Kernel *kernel;
  bool wants_contiguous;  // torch tags its own op of the name so
};

// The schemas of torch 2.13's _c10d_functional, with three differences: the group is a str (torch says Any, which its
// stable ABI cannot pass), what writes in place returns nothing (a result that aliases an argument cannot be traced),
// and wait_tensor says that it returns its argument (else a compiler reuses the memory, which it takes for another's).
constexpr Op kOps[] = {
    {"all_reduce", "(Tensor input, str reduce_op, str group_name) -> Tensor", all_reduce, false},
    {"all_reduce_", "(Tensor(a!) input, str reduce_op, str group_name) -> ()", all_reduce_, false},
    {"all_gather_into_tensor", "(Tensor input, int group_size, str group_name) -> Tensor", all_gather_into_tensor,
     true},
    {"all_gather_into_tensor_out", "(Tensor input, int group_size, str group_name, *, Tensor(a!) out) -> ()",
     all_gather_into_tensor_out, true},
    {"reduce_scatter_tensor", "(Tensor input, str reduce_op, int group_size, str group_name) -> Tensor",
     reduce_scatter_tensor, true},
    {"reduce_scatter_tensor_out",
     "(Tensor input, str reduce_op, int group_size, str group_name, *, Tensor(a!) out) -> ()",
     reduce_scatter_tensor_out, true},
    {"all_to_all_single",
     "(Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes, str group_name) -> Tensor",
     all_to_all_single, true},
    {"broadcast", "(Tensor input, int src, str group_name) -> Tensor", broadcast, false},
    {"broadcast_", "(Tensor(a!) input, int src, str group_name) -> ()", broadcast_, false},
    {"all_reduce_coalesced", "(Tensor[] inputs, str reduce_op, str group_name) -> Tensor[]", all_reduce_coalesced,
     false},
    {"all_reduce_coalesced_", "(Tensor(a!)[] inputs, str reduce_op, str group_name) -> ()", all_reduce_coalesced_,
     false},
    {"all_gather_into_tensor_coalesced", "(Tensor[] inputs, int group_size, str group_name) -> Tensor[]",
     all_gather_into_tensor_coalesced, true},
    {"reduce_scatter_tensor_coalesced", "(Tensor[] inputs, str reduce_op, int group_size, str group_name) -> Tensor[]",
     reduce_scatter_tensor_coalesced, true},
    {"wait_tensor", "(Tensor(a) tensor) -> Tensor(a)", wait_tensor, false},
    // For generated code, where nothing is to be returned; torch has none such.
    {"wait_tensor_", "(Tensor(a!) tensor) -> ()", wait_tensor_, false},
};

// A library handle is never deleted: that would take the ops out again.
bool define(TorchLibraryHandle library, const Op &op, const std::string &schema) {
  const OptionalShim &shim = optional_shim();
  if (!shim.library_def_with_tags || !shim.tag_pt2_compliant_tag || !shim.tag_needs_contiguous_strides)
    return aoti_torch_library_def(library, schema.c_str()) == 0;
  const int32_t tags[] = {shim.tag_pt2_compliant_tag(), shim.tag_needs_contiguous_strides()};
  return shim.library_def_with_tags(library, schema.c_str(), tags, op.wants_contiguous ? 2 : 1) == 0;
}

bool implement(const char *key) {
  TorchLibraryHandle library = nullptr;
  if (aoti_torch_library_init_impl("phalanx", key, "libphalanx_torch.so", 0, &library) != 0) return false;
  for (const Op &op : kOps)
    if (torch_library_impl(library, op.name, op.kernel, kTorchVersion) != 0) return false;
  return true;
}

bool register_all() {
  TorchLibraryHandle ours = nullptr, through_c10d = nullptr;
  if (aoti_torch_library_init_fragment("phalanx", "libphalanx_torch.so", 0, &ours) != 0) return false;
  if (aoti_torch_library_init_fragment("phalanx_c10d", "libphalanx_torch.so", 0, &through_c10d) != 0) return false;
  for (const Op &op : kOps) {
    std::string schema = std::string(op.name) + op.arguments;
    if (!define(ours, op, schema)) return false;
    // The other road is implemented in Python, by torch's own collectives. Waiting needs no such op: torch's takes no
    // group.
    if (op.kernel == wait_tensor || op.kernel == wait_tensor_) continue;
    for (size_t text; (text = schema.find("str ")) != std::string::npos;)
      schema.replace(text, 4, "int ");  // see interned.h
    if (!define(through_c10d, op, schema)) return false;
  }
  return implement("CPU") && implement("CUDA");  // CUDA: to reach torch.distributed with the same ops
}

std::string *load_error = nullptr;

__attribute__((constructor)) void on_load() {
  if (!register_all()) load_error = new std::string("the ops of phalanx could not be registered: " + torch_reason());
}

}  // namespace
}  // namespace phxt

extern "C" {

uint32_t phxt_abi_version(void) { return PHXT_ABI_VERSION; }
const char *phxt_version(void) { return PHX_VERSION_STRING; }
const char *phxt_load_error(void) { return phxt::load_error ? phxt::load_error->c_str() : nullptr; }

phxt_kernel phxt_kernel_of(const char *op) {
  for (const phxt::Op &each : phxt::kOps)
    if (op != nullptr && std::strcmp(each.name, op) == 0) return each.kernel;
  return nullptr;
}

}  // extern "C"
