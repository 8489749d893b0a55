// mm_into_, bmm_into_ and addmm_into_: matrix products into memory that is given, such as a view of an arena.
#include "call.h"
#include "multiply.h"

namespace phxt {
namespace {

struct Factor {
  const char *name;
  const Tensor &tensor;
  int32_t dtype = 0;  // torch's
  int64_t dims = 0;
  const int64_t *sizes = nullptr;  // belong to the tensor

  Factor(const char *argument, const Tensor &of) : name(argument), tensor(of) {
    int64_t *read = nullptr;
    check_torch(aoti_torch_get_dtype(of.get(), &dtype), "read a tensor's dtype");
    check_torch(aoti_torch_get_dim(of.get(), &dims), "read a tensor's dim");
    check_torch(aoti_torch_get_sizes(of.get(), &read), "read a tensor's sizes");
    sizes = read;
  }

  std::string shape() const {
    std::string text = "[";
    for (int64_t dim = 0; dim < dims; ++dim) text += (dim == 0 ? "" : ", ") + std::to_string(sizes[dim]);
    return text + "]";
  }
};

[[noreturn]] void refuse(const char *op, const std::string &text) {
  raise(PHX_ERR_INVALID, std::string(op) + ": " + text);
}

void check_device_and_dtype(const char *op, const Factor &out, const Factor &input) {
  const int32_t gpu = gpu_of(out.tensor), other = gpu_of(input.tensor);
  if (gpu != other)
    refuse(op, "all operands must be on one device, but out is on " + device_name(gpu) + " and " + input.name + " on " +
                   device_name(other));
  if (input.dtype != out.dtype)
    refuse(op, std::string("all operands must have one dtype, but out is ") + element_type(out.dtype).name + " and " +
                   input.name + " " + element_type(input.dtype).name);
}

// out = a @ b, of matrices or of batches of them.
void check_shapes(const char *op, const Factor &out, const Factor &a, const Factor &b, int64_t dims) {
  bool fits = out.dims == dims && a.dims == dims && b.dims == dims;
  if (fits) {
    const int64_t row = dims - 2, column = dims - 1;
    fits = a.sizes[column] == b.sizes[row] && out.sizes[row] == a.sizes[row] && out.sizes[column] == b.sizes[column];
    for (int64_t dim = 0; dim < row; ++dim)
      fits = fits && a.sizes[dim] == b.sizes[dim] && a.sizes[dim] == out.sizes[dim];
  }
  if (!fits)
    refuse(op, std::string(dims == 2 ? "[m, k] and [k, n] make [m, n]" : "[b, m, k] and [b, k, n] make [b, m, n]") +
                   ", but a is " + a.shape() + ", b is " + b.shape() + " and out is " + out.shape());
  if (!is_contiguous(out.tensor)) refuse(op, "out must be contiguous");
}

void check_bias(const char *op, const Factor &out, const Factor &bias) {
  bool fits = bias.dims <= 2;
  for (int64_t dim = 0; fits && dim < bias.dims; ++dim) {
    const int64_t size = bias.sizes[bias.dims - 1 - dim];
    fits = size == 1 || size == out.sizes[1 - dim];
  }
  if (!fits) refuse(op, "bias is " + bias.shape() + ", which does not broadcast to out, " + out.shape());
}

// Elements of a tensor with any strides lie between its first and its last one.
Range span_of(const Factor &factor) {
  const void *data = nullptr;
  int64_t *strides = nullptr;
  int64_t last = 0;
  check_torch(torch_get_const_data_ptr(factor.tensor.get(), &data), "read a tensor's data pointer");
  check_torch(aoti_torch_get_strides(factor.tensor.get(), &strides), "read a tensor's strides");
  for (int64_t dim = 0; dim < factor.dims; ++dim) {
    if (factor.sizes[dim] == 0) return {};
    last += (factor.sizes[dim] - 1) * strides[dim];
  }
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + static_cast<uintptr_t>(last + 1) * element_type(factor.dtype).bytes};
}

void check_apart(const char *op, const Factor &out, const Factor &input) {
  if (span_of(out).overlaps(span_of(input))) refuse(op, std::string("out must not share memory with ") + input.name);
}

void check(const char *op, const Factor &out, const Factor &a, const Factor &b, int64_t dims) {
  check_device_and_dtype(op, out, a);
  check_device_and_dtype(op, out, b);
  check_shapes(op, out, a, b, dims);
  check_apart(op, out, a);
  check_apart(op, out, b);
  for (const Factor *each : {&out, &a, &b}) settle(each->tensor, kEverything);
}

}  // namespace

void mm_into_(StableIValue *stack, uint64_t, uint64_t) {
  const Tensor out(stack[0]), a(stack[1]), b(stack[2]);
  check("mm_into_", {"out", out}, {"a", a}, {"b", b}, 2);
  multiply(a, b, out);
}

void bmm_into_(StableIValue *stack, uint64_t, uint64_t) {
  const Tensor out(stack[0]), a(stack[1]), b(stack[2]);
  check("bmm_into_", {"out", out}, {"a", a}, {"b", b}, 3);
  multiply_batches(a, b, out);
}

void addmm_into_(StableIValue *stack, uint64_t, uint64_t) {
  const Tensor out(stack[0]), bias(stack[1]), a(stack[2]), b(stack[3]);
  const Factor target("out", out), added("bias", bias);
  check_device_and_dtype("addmm_into_", target, added);
  check("addmm_into_", target, {"a", a}, {"b", b}, 2);
  check_bias("addmm_into_", target, added);
  check_apart("addmm_into_", target, added);
  settle(bias, kEverything);
  multiply_and_add(bias, a, b, out);
}

}  // namespace phxt
