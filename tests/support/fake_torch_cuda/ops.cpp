// The ops of tensors of these GPUs: those that make and view tensors, and for all others the kernels of the CPU, which
// get the memory where the host sees it. A stream is waited for before its memory is touched; while it is captured, the
// kernel is put on it instead, and runs at each replay.
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <unordered_map>

#include "driver.h"
#include "memory.h"

namespace fake_torch {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

at::DeviceGuard on(std::optional<at::Device> device) {
  return at::DeviceGuard(device.has_value() && device->has_index() ? *device : at::Device(at::kCUDA, current_device()));
}
const c10::DispatchKeySet kOurs(c10::DispatchKey::CUDA);

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const at::DeviceGuard guard = on(device);
  return at::detail::empty_generic(size, allocator(), kOurs, at::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const at::DeviceGuard guard = on(device);
  return at::detail::empty_strided_generic(size, stride, allocator(), kOurs, at::dtype_or_default(dtype));
}

const Tensor &resize_(const Tensor &self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::TensorImpl *const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const at::Storage &storage = self.storage();
  const size_t needed =
      self.numel() == 0 ? 0 : (static_cast<size_t>(self.storage_offset() + self.numel())) * self.itemsize();
  if (needed <= storage.nbytes()) return self;
  const at::DeviceGuard guard(self.device());
  at::DataPtr grown = allocator()->allocate(needed);
  if (storage.nbytes() != 0) allocator()->copy_data(grown.mutable_get(), storage.data(), storage.nbytes());
  at::Storage(storage).set_data_ptr(std::move(grown));
  storage.unsafeGetStorageImpl()->set_nbytes(needed);
  return self;
}
Tensor &set_storage(Tensor &self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);  // enough where nothing grows
}
Tensor &set_(Tensor &self) {
  const at::DeviceGuard guard(self.device());
  const at::Storage none(c10::Storage::use_byte_size_t(), 0, allocator(), true);
  return self.set_(none, 0, {0}, {});
}
void record_stream_of(Tensor &self, c10::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

// One call of a kernel: tensors of ours are replaced by what stands for them, and results come back as tensors of ours.
class Substitution {
 public:
  explicit Substitution(bool meta) : meta_(meta) {}

  std::optional<at::Device> device;  // the first one that was seen

  IValue replace(const IValue &value) {
    if (value.isTensor()) return IValue(replace(value.toTensor()));
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor &each : value.toTensorVector()) list.push_back(replace(each));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor> &each : value.toOptionalTensorVector())
        list.push_back(each.has_value() ? std::optional<Tensor>(replace(*each)) : std::nullopt);
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (!device) device = value.toDevice();
      return IValue(at::Device(meta_ ? at::kMeta : at::kCPU));
    }
    return value;
  }
  IValue restore(const IValue &value) {
    if (value.isTensor()) return IValue(restore(value.toTensor()));
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor &each : value.toTensorVector()) list.push_back(restore(each));
      return list;
    }
    return value;
  }

 private:
  Tensor replace(const Tensor &tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    if (!device) device = tensor.device();
    const Tensor standin = stand_in(tensor);
    originals_.emplace(standin.unsafeGetTensorImpl(), tensor);
    kept_.push_back(standin);
    return standin;
  }
  Tensor stand_in(const Tensor &tensor) {
    if (meta_) return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    const auto options = tensor.options().device(at::kCPU);
    if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    const at::Storage &storage = tensor.storage();
    auto found = storages_.find(storage.unsafeGetStorageImpl());
    if (found == storages_.end()) {
      void *const host = host_address(storage.data());
      const Tensor bytes = at::from_blob(host, {static_cast<int64_t>(storage.nbytes())}, at::kByte);
      found = storages_.emplace(storage.unsafeGetStorageImpl(), bytes.storage()).first;
      storage_owners_.emplace(bytes.storage().unsafeGetStorageImpl(), tensor);
    }
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second),
                                                           c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  }
  Tensor restore(const Tensor &tensor) {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    const auto found = originals_.find(tensor.unsafeGetTensorImpl());
    if (found != originals_.end()) {
      const Tensor &original = found->second;
      if (original.sizes() == tensor.sizes()) return original;
      resize_(original, tensor.sizes(), std::nullopt);  // an `out` that was empty
      if (!meta_) original.copy_(tensor);
      return original;
    }
    const auto owner = storage_owners_.find(tensor.storage().unsafeGetStorageImpl());
    if (owner != storage_owners_.end())
      return at::native::as_strided_tensorimpl(owner->second, tensor.sizes(), tensor.strides(),
                                               tensor.storage_offset());
    if (tensor.is_cpu() == meta_) return tensor;
    Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(*device));
    if (!meta_ && tensor.numel() != 0) stand_in(made).copy_(tensor);
    return made;
  }

  const bool meta_;
  std::vector<Tensor> kept_;
  std::unordered_map<const c10::TensorImpl *, Tensor> originals_;
  std::unordered_map<const c10::StorageImpl *, c10::Storage> storages_;
  std::unordered_map<const c10::StorageImpl *, Tensor> storage_owners_;
};

void call(const c10::OperatorHandle &op, c10::DispatchKey key, Stack &stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(c10::DispatchKeySet(key), &stack);
}

// What a replay runs.
struct Captured {
  c10::OperatorHandle op;
  Substitution inputs{false}, outputs{false};
  Stack arguments, results;
};
void run_captured(void *data) {
  auto *const captured = static_cast<Captured *>(data);
  const at::AutoDispatchBelowADInplaceOrView guard;
  Stack stack = captured->arguments;
  captured->op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  for (size_t i = 0; i < stack.size(); ++i) {
    const auto put = [](const Tensor &to, const Tensor &from) {
      if (to.defined() && to.unsafeGetTensorImpl() != from.unsafeGetTensorImpl() && to.numel() != 0 &&
          to.data_ptr() != from.data_ptr())
        to.copy_(from);
    };
    if (stack[i].isTensor()) put(captured->results[i].toTensor(), stack[i].toTensor());
    if (!stack[i].isTensorList()) continue;
    const std::vector<Tensor> to = captured->results[i].toTensorVector(), from = stack[i].toTensorVector();
    for (size_t j = 0; j < to.size(); ++j) put(to[j], from[j]);
  }
}

void capture(const c10::OperatorHandle &op, const c10::Stream &stream, const Stack &arguments, Stack *results) {
  TORCH_CHECK(op.schema().name() != "aten::_local_scalar_dense",
              "CUDA error: operation not permitted when stream is capturing");
  Substitution shapes(true);
  for (const IValue &each : arguments) results->push_back(shapes.replace(each));
  call(op, c10::DispatchKey::Meta, *results);
  auto *const captured =
      new Captured{op, Substitution(false), Substitution(false), {}, {}};  // the graph may be replayed
  for (const IValue &each : arguments) captured->arguments.push_back(captured->inputs.replace(each));
  for (IValue &each : *results) {
    each = shapes.restore(each);
    captured->results.push_back(captured->inputs.replace(each));
  }
  const InContext context(stream.device_index());
  FAKE_CHECK(cuLaunchHostFunc(handle_of(stream), run_captured, captured));
}

void fallback(const c10::OperatorHandle &op, Stack *stack) {
  const size_t count = op.schema().arguments().size();
  const Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  torch::jit::drop(*stack, count);
  Substitution substitution(false);
  Stack calling;
  for (const IValue &each : arguments) calling.push_back(substitution.replace(each));
  const c10::DeviceIndex device =
      substitution.device && substitution.device->has_index() ? substitution.device->index() : current_device();
  substitution.device = at::Device(at::kCUDA, device);
  const at::DeviceGuard guard(*substitution.device);
  const c10::Stream stream = current_stream(device);
  if (is_capturing(stream)) {
    Stack results;
    capture(op, stream, arguments, &results);
    for (IValue &each : results) stack->push_back(std::move(each));
    return;
  }
  wait_for(stream);
  call(op, c10::DispatchKey::CPU, calling);
  for (const IValue &each : calling) stack->push_back(substitution.restore(each));
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// A torch that was built for CUDA has kernels for GPUs, which come before a fallback.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  c10::Dispatcher &dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName &name : dispatcher.getAllOpNames()) {
    const std::optional<c10::OperatorHandle> op = dispatcher.findOp(name);
    if (name.getNamespace() != "aten" || !op || !op->hasSchema() ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA))
      continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("set_", set_);
  library.impl("set_.source_Storage", at::native::set_);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("record_stream", record_stream_of);
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace fake_torch
