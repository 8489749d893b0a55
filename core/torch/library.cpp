// Registers the ops when the library is loaded, so that torch.ops.load_library, dlopen and AOTInductor packages all
// work.
#include <array>
#include <atomic>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "call.h"
#include "library.h"
#include "optional_shim.h"
#include "phalanx_torch.h"
#include "phx_fingerprint.h"  // made by cmake/fingerprint.cmake

namespace phxt {
namespace {

enum class Kind : uint8_t {
  collective,  // also as blocking_<name> and in phalanx_ordered, and in phalanx_c10d for groups that are not ours
  single,      // only in phalanx; waits are such, as torch's take no group
  factory,     // in phalanx and phalanx_c10d, without a tensor among its arguments: torch finds its kernel elsewhere
};

struct Op {
  const char *name;
  const char *arguments;  // and result: the schema without its name
  Kernel *kernel;
  bool wants_contiguous;  // torch tags its own op of the name so
  Kind kind = Kind::collective;
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
    // torch has none such: sizes[i] indices of `dim` come from rank i, or go there. A result may not depend on what the
    // arguments do not say, so this rank's size is one of them.
    {"all_gather_v", "(Tensor input, SymInt[] sizes, int dim, str group_name) -> Tensor", all_gather_v, true},
    {"reduce_scatter_v", "(Tensor input, str reduce_op, SymInt[] sizes, SymInt own, int dim, str group_name) -> Tensor",
     reduce_scatter_v, true},
    {"all_to_all_single",
     "(Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes, str group_name) -> Tensor",
     all_to_all_single, true},
    // As torch's _dtensor::shard_dim_alltoall, also with uneven parts: split along one dim, and joined along another.
    {"shard_dim_alltoall",
     "(Tensor input, SymInt[] gather_sizes, SymInt[] shard_sizes, SymInt own, int gather_dim, int shard_dim, "
     "str group_name) -> Tensor",
     shard_dim_alltoall, true},
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
    {"wait_tensor", "(Tensor(a) tensor) -> Tensor(a)", wait_tensor, false, Kind::single},
    // For generated code, where nothing is to be returned; torch has none such.
    {"wait_tensor_", "(Tensor(a!) tensor) -> ()", wait_tensor_, false, Kind::single},
    // The other ops of compiled graphs: see phalanx_torch.h.
    {"symm_arena", "(SymInt nbytes, str plan, str group_name, int gpu=-1) -> Tensor", symm_arena, false, Kind::factory},
    {"arena_view", "(Tensor(a) arena, SymInt offset, SymInt[] size, ScalarType dtype, int gpu=-1) -> Tensor(a)",
     arena_view, false, Kind::single},
    {"arena_release_", "(Tensor(a!) arena, Tensor[] readers) -> ()", arena_release_, false, Kind::single},
    {"mm_into_", "(Tensor(a!) out, Tensor a, Tensor b) -> ()", mm_into_, false, Kind::single},
    {"bmm_into_", "(Tensor(a!) out, Tensor a, Tensor b) -> ()", bmm_into_, false, Kind::single},
    {"addmm_into_", "(Tensor(a!) out, Tensor bias, Tensor a, Tensor b) -> ()", addmm_into_, false, Kind::single},
    // Complete on return. With `pieces` 0 the op chooses their number.
    {"mm_reduce_scatter",
     "(Tensor a, Tensor b, str reduce_op, int group_size, str group_name, SymInt pieces) -> Tensor", mm_reduce_scatter,
     false, Kind::single},
    {"all_gather_mms", "(Tensor shard, Tensor[] bs, int group_size, str group_name) -> Tensor[]", all_gather_mms, false,
     Kind::single},
};

// A library handle is never deleted: that would take the ops out again.
bool define(TorchLibraryHandle library, const Op &op, const std::string &schema) {
  const OptionalShim &shim = optional_shim();
  if (!shim.library_def_with_tags || !shim.tag_pt2_compliant_tag || !shim.tag_needs_contiguous_strides)
    return aoti_torch_library_def(library, schema.c_str()) == 0;
  const int32_t tags[] = {shim.tag_pt2_compliant_tag(), shim.tag_needs_contiguous_strides()};
  return shim.library_def_with_tags(library, schema.c_str(), tags, op.wants_contiguous ? 2 : 1) == 0;
}

std::atomic<phxt_around> around{nullptr};
std::atomic<void (*)(void *)> span_end{nullptr};

// The kernel for callers in C: see phxt_kernel.
template <size_t I>
phx_status quiet_kernel(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  return quietly([&] { kOps[I].kernel(stack, inputs, outputs); });
}

// The kernel, or what is called in its place: see phxt_set_around.
template <size_t I>
void shown_kernel(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  const phxt_around shown = around.load(std::memory_order_acquire);
  if (__builtin_expect(shown != nullptr, 0))
    return check_kept(shown(kOps[I].name, quiet_kernel<I>, stack, inputs, outputs, &open_span));
  kOps[I].kernel(stack, inputs, outputs);
}
template <size_t I>
constexpr Kernel *registered() {
  constexpr bool on_group = std::string_view(kOps[I].arguments).find("group_name") != std::string_view::npos;
  return on_group && kOps[I].kind != Kind::factory ? shown_kernel<I> : kOps[I].kernel;
}

// The kernel of blocking_<name>: complete on return.
template <size_t I>
void blocking_kernel(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  const CompletionScope scope(true);
  registered<I>()(stack, inputs, outputs);
}
std::string blocking(std::string name_or_schema) { return name_or_schema.insert(0, "blocking_"); }

// The kernel of a collective in phalanx_ordered, which has two arguments more, at the end: a tensor that stands for the
// order of what is sent, which only compilers look at, and whether it may be left pending.
template <size_t I>
void ordered_kernel(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  const Tensor order(stack[inputs - 2]);
  const CompletionScope scope(stack[inputs - 1] == 0);
  registered<I>()(stack, inputs - 2, outputs);
}
// A result that is a list goes with no written argument in torch's compilers, so there `order` is only read.
std::string ordered_schema(std::string schema) {
  const bool gives_list = schema.find("-> Tensor[]") != std::string::npos;
  return schema.replace(schema.find(") ->"), 1,
                        std::string(", Tensor") + (gives_list ? "" : "(o!)") + " order, bool start=False)");
}
template <size_t... I>
constexpr std::array<Kernel *, sizeof...(I)> registered_kernels(std::index_sequence<I...>) {
  return {registered<I>()...};
}
template <size_t... I>
constexpr std::array<phxt_kernel, sizeof...(I)> quiet_kernels(std::index_sequence<I...>) {
  return {quiet_kernel<I>...};
}
template <size_t... I>
constexpr std::array<Kernel *, sizeof...(I)> blocking_kernels(std::index_sequence<I...>) {
  return {blocking_kernel<I>...};
}
template <size_t... I>
constexpr std::array<Kernel *, sizeof...(I)> ordered_kernels(std::index_sequence<I...>) {
  return {ordered_kernel<I>...};
}
constexpr size_t kOpCount = std::size(kOps);
constexpr std::array<Kernel *, kOpCount> kKernels = registered_kernels(std::make_index_sequence<kOpCount>());
constexpr std::array<phxt_kernel, kOpCount> kQuietKernels = quiet_kernels(std::make_index_sequence<kOpCount>());
constexpr std::array<Kernel *, kOpCount> kBlockingKernels = blocking_kernels(std::make_index_sequence<kOpCount>());
constexpr std::array<Kernel *, kOpCount> kOrderedKernels = ordered_kernels(std::make_index_sequence<kOpCount>());

bool implements(const Op &op, std::string_view key) {
  if (op.kind == Kind::factory) return key == "CompositeExplicitAutograd";
  return true;
}

bool implement(const char *key) {
  TorchLibraryHandle ours = nullptr, ordered = nullptr;
  if (aoti_torch_library_init_impl("phalanx", key, "libphalanx_torch.so", 0, &ours) != 0) return false;
  if (aoti_torch_library_init_impl("phalanx_ordered", key, "libphalanx_torch.so", 0, &ordered) != 0) return false;
  for (size_t i = 0; i < kOpCount; ++i) {
    if (!implements(kOps[i], key)) continue;
    if (torch_library_impl(ours, kOps[i].name, kKernels[i], kTorchVersion) != 0) return false;
    if (kOps[i].kind != Kind::collective) continue;
    if (torch_library_impl(ours, blocking(kOps[i].name).c_str(), kBlockingKernels[i], kTorchVersion) != 0) return false;
    if (torch_library_impl(ordered, kOps[i].name, kOrderedKernels[i], kTorchVersion) != 0) return false;
  }
  return true;
}

bool register_all() {
  TorchLibraryHandle ours = nullptr, ordered = nullptr, through_c10d = nullptr;
  if (aoti_torch_library_init_fragment("phalanx", "libphalanx_torch.so", 0, &ours) != 0) return false;
  if (aoti_torch_library_init_fragment("phalanx_ordered", "libphalanx_torch.so", 0, &ordered) != 0) return false;
  if (aoti_torch_library_init_fragment("phalanx_c10d", "libphalanx_torch.so", 0, &through_c10d) != 0) return false;
  for (const Op &op : kOps) {
    std::string schema = std::string(op.name) + op.arguments;
    if (!define(ours, op, schema)) return false;
    if (op.kind == Kind::collective &&
        (!define(ours, op, blocking(schema)) || !define(ordered, op, ordered_schema(schema))))
      return false;
    if (op.kind != Kind::collective && op.kind != Kind::factory) continue;
    // The fallback is implemented in Python, by torch's own collectives.
    for (size_t text; (text = schema.find("str ")) != std::string::npos;)
      schema.replace(text, 4, "int ");  // see interned.h
    if (!define(through_c10d, op, schema)) return false;
  }
  return implement("CPU") && implement("CUDA") && implement("CompositeExplicitAutograd");
}

std::string *load_error = nullptr;

__attribute__((constructor)) void on_load() {
  if (!register_all()) load_error = new std::string("the ops of phalanx could not be registered: " + torch_reason());
  if (std::strstr(phx_build_info(), "\"" PHX_FINGERPRINT "\"") == nullptr)
    load_error = new std::string("libphalanx_torch.so is of build " PHX_FINGERPRINT
                                 ", and the libphalanx.so.0 that was loaded is another one: " +
                                 std::string(phx_build_info()) + "; reinstall phalanx-core");
}

}  // namespace

void end_span(void *span) {
  if (const auto end = span_end.load(std::memory_order_acquire); end != nullptr) end(span);
}

}  // namespace phxt

extern "C" {

void phxt_set_around(phxt_around around, void (*end)(void *span)) {
  if (end != nullptr) phxt::span_end.store(end, std::memory_order_release);
  phxt::around.store(around, std::memory_order_release);
}

uint32_t phxt_abi_version(void) { return PHXT_ABI_VERSION; }
const char *phxt_version(void) { return PHX_VERSION_STRING; }
const char *phxt_load_error(void) { return phxt::load_error ? phxt::load_error->c_str() : nullptr; }

phxt_kernel phxt_kernel_of(const char *op) {
  for (size_t i = 0; i < phxt::kOpCount; ++i)
    if (op != nullptr && std::strcmp(phxt::kOps[i].name, op) == 0) return phxt::kQuietKernels[i];
  return nullptr;
}

}  // extern "C"
