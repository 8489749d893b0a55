// Reads tensors through torch's shim. Out of the fast path: copies of tensors with strides, and dtypes that are only
// moved.
#include "tensors.h"

#include <array>

#include "gpu.h"
#include "host_memory.h"
#include "pending.h"
#include "phalanx/phalanx.h"

namespace phxt {
namespace {

constexpr size_t kTableSize = 64;  // torch's numbers of dtypes are below it; others take the slow way

std::array<ElementType, kTableSize> make_table() {
  std::array<ElementType, kTableSize> table{};
  const auto enter = [&](int32_t number, ElementType type) {
    if (number >= 0 && static_cast<size_t>(number) < kTableSize) table[static_cast<size_t>(number)] = type;
  };
  enter(aoti_torch_dtype_float16(), {PHX_DTYPE_F16, 1, 2, Reducible::always, "float16"});
  enter(aoti_torch_dtype_bfloat16(), {PHX_DTYPE_BF16, 1, 2, Reducible::always, "bfloat16"});
  enter(aoti_torch_dtype_float32(), {PHX_DTYPE_F32, 1, 4, Reducible::always, "float32"});
  enter(aoti_torch_dtype_float64(), {PHX_DTYPE_F64, 1, 8, Reducible::always, "float64"});
  enter(aoti_torch_dtype_int8(), {PHX_DTYPE_I8, 1, 1, Reducible::always, "int8"});
  enter(aoti_torch_dtype_uint8(), {PHX_DTYPE_U8, 1, 1, Reducible::always, "uint8"});
  enter(aoti_torch_dtype_int16(), {PHX_DTYPE_I16, 1, 2, Reducible::always, "int16"});
  enter(aoti_torch_dtype_uint16(), {PHX_DTYPE_U16, 1, 2, Reducible::always, "uint16"});
  enter(aoti_torch_dtype_int32(), {PHX_DTYPE_I32, 1, 4, Reducible::always, "int32"});
  enter(aoti_torch_dtype_uint32(), {PHX_DTYPE_U32, 1, 4, Reducible::always, "uint32"});
  enter(aoti_torch_dtype_int64(), {PHX_DTYPE_I64, 1, 8, Reducible::always, "int64"});
  enter(aoti_torch_dtype_uint64(), {PHX_DTYPE_U64, 1, 8, Reducible::always, "uint64"});
  enter(aoti_torch_dtype_bool(), {PHX_DTYPE_BOOL, 1, 1, Reducible::always, "bool"});
  enter(aoti_torch_dtype_complex32(), {PHX_DTYPE_F16, 2, 4, Reducible::sums, "complex32"});
  enter(aoti_torch_dtype_complex64(), {PHX_DTYPE_F32, 2, 8, Reducible::sums, "complex64"});
  enter(aoti_torch_dtype_complex128(), {PHX_DTYPE_F64, 2, 16, Reducible::sums, "complex128"});
  return table;
}

// Everything but the data pointer.
Operand describe(const Tensor &tensor, int32_t gpu) {
  Operand result;
  result.gpu = gpu;
  int64_t *sizes = nullptr;
  check_torch(aoti_torch_get_dtype(tensor.get(), &result.dtype), "read a tensor's dtype");
  check_torch(aoti_torch_get_dim(tensor.get(), &result.dims), "read a tensor's dim");
  check_torch(aoti_torch_get_sizes(tensor.get(), &sizes), "read a tensor's sizes");
  check_torch(aoti_torch_get_numel(tensor.get(), &result.numel), "read a tensor's numel");
  result.sizes = sizes;
  result.type = element_type(result.dtype);
  return result;
}

// Whether several indices of a dim are one place in memory.
bool is_expanded(const Tensor &tensor, const Operand &operand) {
  int64_t *strides = nullptr;
  check_torch(aoti_torch_get_strides(tensor.get(), &strides), "read a tensor's strides");
  for (int64_t dim = 0; dim < operand.dims; ++dim)
    if (operand.sizes[dim] > 1 && strides[dim] == 0 && operand.numel > 0) return true;
  return false;
}

Operand replaced_by_copy(const Tensor &tensor, Operand operand) {
  settle(tensor, kEverything);
  operand.copy = empty(operand.sizes, operand.dims, operand.dtype, operand.gpu);
  copy_into(operand.copy, tensor);
  operand.data = mutable_data(operand.copy);
  return operand;
}

}  // namespace

ElementType element_type(int32_t torch_dtype) {
  static const std::array<ElementType, kTableSize> table = make_table();
  if (torch_dtype >= 0 && static_cast<size_t>(torch_dtype) < kTableSize && table[static_cast<size_t>(torch_dtype)].name)
    return table[static_cast<size_t>(torch_dtype)];
  const auto bytes = static_cast<uint32_t>(aoti_torch_dtype_element_size(torch_dtype));
  return {PHX_DTYPE_U8, bytes, bytes, Reducible::never, bytes == 1 ? "of this 8-bit format" : "of this format"};
}

void settle(const Tensor &tensor, const Range &range) {
  if (pending_count() != 0) check_kept(wait_overlapping(storage_base(tensor), range));
  if (gpu::has_marks()) check_kept(gpu::follow_overlapping(storage_base(tensor), range));
}

int64_t Operand::numel_of_row() const {
  int64_t result = 1;
  for (int64_t dim = 1; dim < dims; ++dim) result *= sizes[dim];
  return result;
}

bool on_cpu(const Tensor &tensor) {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  int32_t device = 0;
  check_torch(aoti_torch_get_device_type(tensor.get(), &device), "read a tensor's device");
  return device == cpu;
}

int32_t gpu_of(const Tensor &tensor) {
  static const int32_t cuda = aoti_torch_device_type_cuda();
  if (on_cpu(tensor)) return kHost;
  int32_t device = 0, index = 0;
  check_torch(aoti_torch_get_device_type(tensor.get(), &device), "read a tensor's device");
  if (device != cuda) return kElsewhere;
  check_torch(aoti_torch_get_device_index(tensor.get(), &index), "read a tensor's device");
  return index;
}

std::string device_name(int32_t gpu) {
  if (gpu == kHost) return "the CPU";
  return gpu == kElsewhere ? "another device" : "cuda:" + std::to_string(gpu);
}

bool is_contiguous(const Tensor &tensor) {
  bool result = false;
  check_torch(aoti_torch_is_contiguous(tensor.get(), &result), "read a tensor's strides");
  return result;
}

void *mutable_data(const Tensor &tensor) {
  void *data = nullptr;
  check_torch(torch_get_mutable_data_ptr(tensor.get(), &data), "read a tensor's data pointer");
  return data;
}

Operand read_operand(const Tensor &tensor, int32_t gpu) {
  Operand operand = describe(tensor, gpu);
  if (!is_contiguous(tensor)) return replaced_by_copy(tensor, std::move(operand));
  const void *data = nullptr;  // by the const call, so that a lazy copy of torch's is not made real
  check_torch(torch_get_const_data_ptr(tensor.get(), &data), "read a tensor's data pointer");
  operand.data = const_cast<void *>(data);
  settle(tensor, operand.range());
  return operand;
}

Operand write_operand(const Tensor &tensor, int32_t gpu) {
  Operand operand = describe(tensor, gpu);
  if (!is_contiguous(tensor)) {
    if (is_expanded(tensor, operand)) raise(PHX_ERR_INVALID, kSharedOutputs);
    return replaced_by_copy(tensor, std::move(operand));
  }
  operand.data = mutable_data(tensor);
  settle(tensor, operand.range());
  return operand;
}

void make_private(Operand &operand, const Tensor &tensor) {
  Tensor copy = empty(operand.sizes, operand.dims, operand.dtype, operand.gpu);
  void *data = mutable_data(copy);
  if (operand.gpu != kHost)
    copy_into(copy, tensor);
  else if (operand.bytes())
    __builtin_memcpy(data, operand.data, operand.bytes());
  operand.copy = std::move(copy);
  operand.data = data;
}

Tensor empty(const int64_t *sizes, int64_t dims, int32_t torch_dtype, int32_t gpu) {
  int64_t few[8];
  std::vector<int64_t> many;
  int64_t *strides = few;
  if (dims > 8) {
    many.resize(static_cast<size_t>(dims));
    strides = many.data();
  }
  int64_t stride = 1, numel = 1;
  for (int64_t dim = dims - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= sizes[dim] > 1 ? sizes[dim] : 1;  // as torch counts them, also where a size is 0
    numel *= sizes[dim];
  }
  const size_t bytes = static_cast<size_t>(numel) * element_type(torch_dtype).bytes;
  if (gpu == kHost && bytes >= kLargeTensor)
    if (Tensor kept = large_tensor(sizes, strides, dims, torch_dtype, bytes)) return kept;
  AtenTensorHandle made = nullptr;
  const int32_t device = gpu == kHost ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
  check_torch(aoti_torch_empty_strided(dims, sizes, strides, torch_dtype, device, gpu == kHost ? 0 : gpu, &made),
              "allocate a tensor");
  Tensor result(made);
  if (gpu == kHost) expect_first_touch(mutable_data(result), bytes);
  return result;
}

std::vector<int64_t> with_dim0(const Operand &like, int64_t dim0) {
  std::vector<int64_t> sizes(like.sizes, like.sizes + like.dims);
  if (sizes.empty()) sizes.push_back(dim0);
  sizes[0] = dim0;
  return sizes;
}

void copy_into(const Tensor &target, const Tensor &source) {
  const NoGrad no_grad;
  check_torch(aoti_torch_copy_(target.get(), source.get(), 0), "copy a tensor");
}

uintptr_t storage_base(const Tensor &tensor) {
  const void *data = nullptr;
  int64_t offset = 0;
  int32_t dtype = 0;
  if (torch_get_const_data_ptr(tensor.get(), &data) != 0 || data == nullptr) return 0;
  check_torch(aoti_torch_get_storage_offset(tensor.get(), &offset), "read a tensor's storage offset");
  if (offset == 0) return reinterpret_cast<uintptr_t>(data);
  check_torch(aoti_torch_get_dtype(tensor.get(), &dtype), "read a tensor's dtype");
  return reinterpret_cast<uintptr_t>(data) - static_cast<uintptr_t>(offset) * element_type(dtype).bytes;
}

}  // namespace phxt
