// The autograd kernels of the ops of phalanx.collectives for the calls that need no gradient: nothing but what the
// kernels in Python do then, without Python. A call that needs a gradient goes to the op of the same name in
// phalanx_autograd, whose autograd kernel is the one in Python.
//
// Compiled by `phalanx build` for the torch that is installed, and loaded only by that torch.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <vector>

namespace {

bool needs_gradient(const c10::IValue &value) {
  if (value.isTensor()) return value.toTensor().requires_grad();
  if (!value.isTensorList()) return false;
  for (const at::Tensor &tensor : value.toTensorVector())
    if (tensor.requires_grad()) return true;
  return false;
}

void count_version(const at::Tensor &tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Whether the argument is written to.
bool written(const c10::Argument &argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

void autograd(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
  const std::vector<c10::Argument> &arguments = op.schema().arguments();
  const auto given = torch::jit::last(*stack, arguments.size());
  if (c10::GradMode::is_enabled()) {
    for (const c10::IValue &value : given) {
      if (!needs_gradient(value)) continue;
      const std::string name = op.operator_name().name;
      const std::string twin = "phalanx_autograd" + name.substr(name.find("::"));
      c10::Dispatcher::singleton().findSchemaOrThrow(twin.c_str(), "").callBoxed(stack);
      return;
    }
  }
  if (op.schema().is_mutable()) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!written(arguments[i])) continue;
      if (given[i].isTensor()) count_version(given[i].toTensor());
      if (given[i].isTensorList())
        for (const at::Tensor &tensor : given[i].toTensorVector()) count_version(tensor);
    }
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(phalanx, Autograd, library) {
  for (const char *name : {PHALANX_OPS}) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&autograd>());
}
