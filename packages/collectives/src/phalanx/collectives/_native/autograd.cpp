// The autograd kernels of the ops of phalanx.collectives for calls that need no gradient. They do what the kernels in
// Python do for such calls, without Python. A call that needs a gradient goes to the op of the same name in
// phalanx_autograd, whose autograd kernel is in Python.
//
// `phalanx build` compiles this file for the installed torch, and only that torch loads it.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core_api.h"

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

// Whether the op writes to the argument.
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

// Whether only the kernel for the CPU is left below autograd: no mode, no subclass, no lazy negation.
bool only_cpu_is_left(c10::DispatchKeySet keys) {
  return (keys & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId() == c10::DispatchKey::CPU;
}

// torch.ops.phalanx.blocking_all_reduce and its in-place form are called often and with small tensors. Their arguments
// go to the core from here, without a second pass through the dispatcher and without the copies of the stable ABI.
template <bool kInPlace>
bool reduced_directly(c10::DispatchKeySet keys, torch::jit::Stack *stack) {
  const auto given = torch::jit::last(*stack, 3);
  const at::Tensor &input = given[0].toTensor();
  if (phalanx_native::library.all_reduce == nullptr || !only_cpu_is_left(keys) || !input.is_contiguous() ||
      (input.requires_grad() && c10::GradMode::is_enabled()))
    return false;
  at::Tensor output = kInPlace ? input : at::Tensor(at::detail::empty_cpu(input.sizes(), input.scalar_type()));
  const std::string &reduce_op = given[1].toStringRef(), &group = given[2].toStringRef();
  void *const out = output.mutable_data_ptr();
  const int32_t done = phalanx_native::library.all_reduce(kInPlace ? out : input.const_data_ptr(), out, input.numel(),
                                                          static_cast<int32_t>(input.scalar_type()), reduce_op.data(),
                                                          reduce_op.size(), group.data(), group.size());
  if (done == 0) return false;
  phalanx_native::raise_on(done);
  if (kInPlace) count_version(input);
  torch::jit::drop(*stack, 3);
  if (!kInPlace) torch::jit::push(*stack, std::move(output));
  return true;
}

template <bool kInPlace>
void blocking_all_reduce(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
  if (!reduced_directly<kInPlace>(keys, stack)) autograd(op, keys, stack);
}

torch::CppFunction kernel_for(std::string_view name) {
  if (name == "blocking_all_reduce") return torch::CppFunction::makeFromBoxedFunction<&blocking_all_reduce<false>>();
  if (name == "blocking_all_reduce_") return torch::CppFunction::makeFromBoxedFunction<&blocking_all_reduce<true>>();
  return torch::CppFunction::makeFromBoxedFunction<&autograd>();
}

}  // namespace

TORCH_LIBRARY_IMPL(phalanx, Autograd, library) {
  for (const char *name : {PHALANX_OPS}) library.impl(name, kernel_for(name));
}
