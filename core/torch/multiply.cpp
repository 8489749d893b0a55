#include "multiply.h"

#include <initializer_list>

#include "library.h"

namespace phxt {
namespace {

// `<op>.out` of these inputs.
void call_out(const char *op, std::initializer_list<StableIValue> inputs, const Tensor &out) {
  const NoGrad no_grad;
  StableIValue stack[4];
  size_t next = 0;
  for (const StableIValue input : inputs) stack[next++] = input;
  stack[next] = out.share().release();
  check_torch(torch_call_dispatcher(op, "out", stack, kTorchVersion), "multiply matrices");
  const Tensor returned(stack[0]);
}

}  // namespace

void multiply(const Tensor &a, const Tensor &b, const Tensor &out) {
  if (!on_cpu(out)) return call_out("aten::mm", {a.share().release(), b.share().release()}, out);
  check_torch(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()), "multiply matrices");
}

void multiply_batches(const Tensor &a, const Tensor &b, const Tensor &out) {
  if (!on_cpu(out)) return call_out("aten::bmm", {a.share().release(), b.share().release()}, out);
  check_torch(aoti_torch_cpu_bmm_out(out.get(), a.get(), b.get()), "multiply matrices");
}

void multiply_and_add(const Tensor &bias, const Tensor &a, const Tensor &b, const Tensor &out) {
  if (on_cpu(out)) {
    check_torch(aoti_torch_cpu_addmm_out(out.get(), bias.get(), a.get(), b.get(), 1.0, 1.0), "multiply matrices");
    return;
  }
  // Not addmm, whose factors are Scalars, which torch's stable ABI cannot pass; linear is addmm of a transposed b.
  StableIValue transposed[] = {b.share().release()};
  check_torch(torch_call_dispatcher("aten::t", "", transposed, kTorchVersion), "transpose a matrix");
  auto *const optional = new StableIValue(bias.share().release());  // as torch passes one, and deletes it
  call_out("aten::linear", {a.share().release(), transposed[0], reinterpret_cast<StableIValue>(optional)}, out);
}

}  // namespace phxt
