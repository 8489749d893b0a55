#include "products.h"

#include "library.h"

namespace phxt {
namespace {

bool is_float(const ElementType &type) {
  return type.lanes == 1 && type.reduce == Reducible::always &&
         (type.code == PHX_DTYPE_F64 || type.code == PHX_DTYPE_F32 || type.code == PHX_DTYPE_BF16 ||
          type.code == PHX_DTYPE_F16);
}

}  // namespace

Matrix Request::matrix(const char *name, const Tensor &tensor) const {
  Matrix result;
  result.name = name;
  int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
  const void *data = nullptr;
  check_torch(aoti_torch_get_dim(tensor.get(), &dims), "read a tensor's dim");
  if (dims != 2) refuse(std::string(name) + " has " + std::to_string(dims) + " dims; give a matrix of 2 dims");
  if (call && gpu_of(tensor) != call.gpu)
    refuse(std::string(name) + " is on " + device_name(gpu_of(tensor)) + ", but must be on " + device_name(call.gpu) +
           ", as the other operands are");
  check_torch(aoti_torch_get_dtype(tensor.get(), &result.dtype), "read a tensor's dtype");
  check_torch(aoti_torch_get_sizes(tensor.get(), &sizes), "read a tensor's sizes");
  check_torch(aoti_torch_get_strides(tensor.get(), &strides), "read a tensor's strides");
  check_torch(torch_get_const_data_ptr(tensor.get(), &data), "read a tensor's data pointer");
  result.type = element_type(result.dtype);
  if (!is_float(result.type))
    refuse(std::string(name) + " is " + result.type.name + ", but must be float64, float32, bfloat16 or float16");
  result.rows = sizes[0];
  result.columns = sizes[1];
  const int64_t spanned =
      sizes[0] == 0 || sizes[1] == 0 ? 0 : (sizes[0] - 1) * strides[0] + (sizes[1] - 1) * strides[1] + 1;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  if (call) settle(tensor, {begin, begin + static_cast<uintptr_t>(spanned) * result.type.bytes});
  return result;
}

void Request::check_factors(const Matrix &a, const Matrix &b) const {
  if (a.dtype != b.dtype || a.columns != b.rows)
    refuse(a.text() + " and " + b.text() + "; they must have the same dtype, and b as many rows as " + a.name +
           " has columns");
}

void Request::check_size(int64_t group_size) const {
  if (call) check_group_size(call, group_size);
  if (group_size < 1) refuse("group_size is " + std::to_string(group_size) + ", but must be at least 1");
}

Tensor rows(const Tensor &matrix, int64_t begin, int64_t count) {
  StableIValue stack[] = {matrix.share().release(), 0, release(begin), release(count)};
  check_torch(torch_call_dispatcher("aten::narrow", "", stack, kTorchVersion), "take rows of a matrix");
  return Tensor(stack[0]);
}

Tensor product(const Tensor &a, const Tensor &b) {  // on any device
  StableIValue stack[] = {a.share().release(), b.share().release()};
  check_torch(torch_call_dispatcher("aten::mm", "", stack, kTorchVersion), "multiply two matrices");
  return Tensor(stack[0]);
}

Tensor as_matrix(void *data, int64_t rows, int64_t columns, int32_t dtype) {
  const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  AtenTensorHandle made = nullptr;
  check_torch(torch_from_blob(
                  data, 2, sizes, strides, 0, dtype, aoti_torch_device_type_cpu(), -1, &made,
                  aoti_torch_layout_strided(), nullptr, 0, [](void *, void *) {}, nullptr),
              "make a tensor of symmetric memory");
  return Tensor(made);
}

}  // namespace phxt
