#include "show_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/accumulate.h>
#include <phalanx/phalanx.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/csrc/stable/c/shim.h>

#include <string_view>

#include "record.h"
#include "tensors.h"

namespace py = pybind11;

namespace phalanx {
namespace {

using Tensors = std::vector<at::Tensor>;
using Kernel = phx_status (*)(StableIValue *stack, uint64_t inputs, uint64_t outputs);
using Around = phx_status (*)(const char *op, Kernel kernel, StableIValue *stack, uint64_t inputs, uint64_t outputs,
                              void **span);

// Functions of phalanx_torch.h and phalanx.h, which the binding hands over.
struct Library {
  phx_group *(*group_find)(const char *name);
  decltype(&phx_group_get_info) group_get_info;
  decltype(&phx_group_release) group_release;
} library;

// From the start of an op to the completion of its collective, which may come after the op, in another thread.
struct OpSpan {
  OpSpan(std::string name, const Tensors &tensors) : title(std::move(name)), function(at::RecordScope::USER_SCOPE) {
    if (!function.isActive()) return;
    function._setAsync();
    for (const at::Tensor &tensor : tensors) inputs.emplace_back(tensor);
    function.before(title.c_str(), c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
  }
  const std::string title;
  std::vector<c10::IValue> inputs;
  at::RecordFunction function;
};
void end_span(void *span) { delete static_cast<OpSpan *>(span); }

// The arguments of an op on its stack, which still owns them.
class Arguments {
 public:
  Arguments(const char *op, const StableIValue *stack)
      : schema_(c10::Dispatcher::singleton().findSchemaOrThrow((std::string("phalanx::") + op).c_str(), "").schema()),
        stack_(stack) {}

  const StableIValue *find(std::string_view name) const {
    const auto index = schema_.argumentIndexWithName(name);
    return index ? &stack_[*index] : nullptr;
  }
  at::Tensor tensor(std::string_view name) const { return tensor_of(*find(name)); }
  // The first argument, a tensor or a list of them.
  Tensors first() const {
    if (schema_.arguments()[0].type()->kind() != c10::TypeKind::ListType) return {tensor_of(stack_[0])};
    Tensors tensors;
    for (const StableIValue item : list(stack_[0])) tensors.push_back(tensor_of(item));
    return tensors;
  }
  std::vector<int64_t> integers(std::string_view name) const {
    const StableIValue *const found = find(name);
    if (found == nullptr) return {};
    std::vector<int64_t> values;
    for (const StableIValue item : list(*found)) values.push_back(static_cast<int64_t>(item));
    return values;
  }
  const char *text(std::string_view name) const {
    const char *data = "";
    if (const StableIValue *const found = find(name)) torch_string_c_str(reinterpret_cast<StringHandle>(*found), &data);
    return data;
  }

 private:
  static at::Tensor tensor_of(StableIValue value) {
    return *torch::aot_inductor::tensor_handle_to_tensor_pointer(reinterpret_cast<AtenTensorHandle>(value));
  }
  static std::vector<StableIValue> list(StableIValue value) {
    const auto handle = reinterpret_cast<StableListHandle>(value);
    size_t size = 0;
    torch_list_size(handle, &size);
    std::vector<StableIValue> items(size);
    for (size_t i = 0; i < size; ++i) torch_list_get_item(handle, i, &items[i]);
    return items;
  }

  const c10::FunctionSchema &schema_;
  const StableIValue *const stack_;
};

Comms comms_of(std::string_view op, const Arguments &given, int64_t size) {
  Comms comms;
  const bool several = op.find("coalesced") != std::string_view::npos;
  comms.inputs = given.first();
  comms.in_count = comms.out_count = numel_of(comms.inputs);
  comms.async =
      !op.ends_with("_") && !op.ends_with("_out") && !op.starts_with("mm_") && !op.starts_with("all_gather_mm");
  if (op == "mm_reduce_scatter") comms.in_count = comms.inputs[0].size(0) * given.tensor("b").size(1);
  if (op.starts_with("all_reduce")) {
    comms.name = several ? "allreduce_coalesced" : "allreduce";
  } else if (op.starts_with("broadcast")) {
    comms.name = "broadcast";
    comms.rank = static_cast<int64_t>(*given.find("src"));
  } else if (op.starts_with("all_gather")) {
    comms.name = several ? "allgather_into_tensor_coalesced" : "_allgather_base";
    comms.out_count = comms.in_count * size;
  } else if (op.starts_with("reduce_scatter") || op == "mm_reduce_scatter") {
    comms.name = several ? "reduce_scatter_tensor_coalesced" : "_reduce_scatter_base";
    comms.out_count = comms.in_count / size;
  } else if (op.starts_with("all_to_all")) {
    comms.in_splits = given.integers("input_split_sizes");
    comms.out_splits = given.integers("output_split_sizes");
    comms.name = comms.out_splits.empty() ? "all_to_all" : "all_to_allv";
    const at::Tensor &input = comms.inputs[0];
    if (!comms.out_splits.empty() && input.dim() > 0)
      comms.out_count = c10::sum_integers(comms.out_splits) * c10::multiply_integers(input.sizes().slice(1));
  } else {
    comms.name = op;
  }
  if (op.ends_with("_out"))
    comms.outputs = {given.tensor("out")};
  else if (op.ends_with("_"))
    comms.outputs = comms.inputs;
  return comms;
}

constexpr const char *kDescription = "phalanx channel 0";  // the channel of the core that counts these collectives

phx_status around(const char *op, Kernel kernel, StableIValue *stack, uint64_t inputs, uint64_t outputs, void **span) {
  if (!is_recorded()) return kernel(stack, inputs, outputs);
  const Arguments given(op, stack);
  const std::string name = given.text("group_name");
  // Held while it is read; without it torch.distributed serves the group, and shows the call or not.
  const std::unique_ptr<phx_group, decltype(library.group_release)> group(library.group_find(name.c_str()),
                                                                          library.group_release);
  phx_group_info info = PHX_GROUP_INFO_INIT;
  if (!group || library.group_get_info(group.get(), &info) != PHX_OK) return kernel(stack, inputs, outputs);
  Comms comms = comms_of(op, given, info.group_size);
  const Members members{name, kDescription, info.group_rank, {info.ranks, info.ranks + info.group_size}};
  const Tensors tensors = comms.inputs;
  const Recording recording(members, std::move(comms), info.sequence + 1);
  struct Opened {
    void **span;
    ~Opened() { end_span(std::exchange(*span, nullptr)); }  // unless a pending collective has taken it over
  } opened{span};
  *span = new OpSpan(std::string("phalanx:") + op, tensors);
  return kernel(stack, inputs, outputs);
}

// A Recording of Python.
struct Block {
  const Members members;
  const Comms comms;
  const uint64_t sequence;
  std::optional<Recording> recording = {};
  std::optional<OpSpan> span = {};

  void enter() {
    recording.emplace(members, comms, sequence);
    span.emplace("phalanx:" + comms.name, comms.inputs);
  }
  void exit(const py::args &) {
    span.reset();
    recording.reset();
  }
};

}  // namespace

void add_recording(py::module_ &module) {
  module.def("show_ops", [](uintptr_t set_around, uintptr_t group_find, uintptr_t get_info, uintptr_t release) {
    library.group_find = reinterpret_cast<decltype(library.group_find)>(group_find);
    library.group_get_info = reinterpret_cast<decltype(library.group_get_info)>(get_info);
    library.group_release = reinterpret_cast<decltype(library.group_release)>(release);
    reinterpret_cast<void (*)(Around, void (*)(void *))>(set_around)(around, end_span);
  });
  module.def("is_recorded", is_recorded);
  // Its collective's name; what it reads and writes; the group's name, this rank in it, its global ranks; the number in
  // the core's recorder, -1 where it has none; the root or peer in the group, -1 where there is none.
  py::class_<Block>(module, "Recording")
      .def(py::init([](std::string name, Tensors inputs, Tensors outputs, std::string group, int64_t rank,
                       std::vector<int64_t> ranks, int64_t sequence, int64_t peer, bool message) {
        const int64_t in_count = numel_of(inputs), out_count = numel_of(outputs);
        return std::unique_ptr<Block>(new Block{
            {std::move(group), kDescription, rank, std::move(ranks)},
            {std::move(name), std::move(inputs), std::move(outputs), in_count, out_count, true, peer, {}, {}, message},
            static_cast<uint64_t>(sequence)});
      }))
      .def("__enter__", &Block::enter)
      .def("__exit__", &Block::exit);
}

}  // namespace phalanx
