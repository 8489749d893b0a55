// Autograd kernels of the ops of c10d for tensors of the CPU.
//
// torch has none for these ops. Its fallback serves them, and has the arguments of each call copied into boxes and out
// of them again, list by list. For a call that needs no gradient all it does is to go on below autograd; the kernels
// here do that with the arguments as they are. A call that needs a gradient goes to the fallback, which warns when
// someone differentiates through it.
#include "autograd.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "backend.h"

namespace phalanx {
namespace {

using GroupRef = const c10::intrusive_ptr<c10d::ProcessGroup> &;
using ReduceOpRef = const c10::intrusive_ptr<c10d::ReduceOp> &;
using TensorAndWork = std::tuple<at::Tensor, C10dWork>;
using TensorsAndWork = std::tuple<Tensors, C10dWork>;
using ListsAndWork = std::tuple<TensorLists, C10dWork>;
using Sizes = std::vector<int64_t>;
using MaybeTensor = std::optional<at::Tensor>;

// The name and the C++ signature of each op, as torch's ProcessGroup.hpp calls it.
#define PHALANX_C10D_OPS(X)                                                                                  \
  X(broadcast_, TensorsAndWork(at::TensorList, GroupRef, int64_t, int64_t, bool, int64_t))                   \
  X(allreduce_, TensorsAndWork(at::TensorList, GroupRef, ReduceOpRef, const MaybeTensor &, bool, int64_t))   \
  X(reduce_, C10dWork(at::TensorList, GroupRef, ReduceOpRef, int64_t, int64_t, bool, int64_t))               \
  X(allgather_, ListsAndWork(const TensorLists &, at::TensorList, GroupRef, bool, int64_t))                  \
  X(_allgather_base_, TensorAndWork(at::Tensor &, at::Tensor &, GroupRef, bool, int64_t))                    \
  X(gather_, C10dWork(const TensorLists &, const at::TensorList &, GroupRef, int64_t, bool, int64_t))        \
  X(scatter_, TensorsAndWork(const at::TensorList &, const TensorLists &, GroupRef, int64_t, bool, int64_t)) \
  X(reduce_scatter_,                                                                                         \
    TensorsAndWork(const at::TensorList &, const TensorLists &, GroupRef, ReduceOpRef, bool, int64_t))       \
  X(_reduce_scatter_base_, TensorAndWork(at::Tensor &, at::Tensor &, GroupRef, ReduceOpRef, bool, int64_t))  \
  X(alltoall_, TensorsAndWork(const at::TensorList &, const at::TensorList &, GroupRef, bool, int64_t))      \
  X(alltoall_base_, C10dWork(at::Tensor &, at::Tensor &, GroupRef, Sizes, Sizes, bool, int64_t))             \
  X(send, C10dWork(at::TensorList, GroupRef, int64_t, int64_t))                                              \
  X(recv_, C10dWork(at::TensorList, GroupRef, int64_t, int64_t))

template <class Other>
bool needs_gradient(const Other &) {
  return false;
}
bool needs_gradient(const at::Tensor &tensor) { return tensor.requires_grad(); }
bool needs_gradient(const MaybeTensor &tensor) { return tensor && tensor->requires_grad(); }
bool needs_gradient(const at::TensorList &tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor &each) { return each.requires_grad(); });
}
bool needs_gradient(const TensorLists &lists) {
  return std::any_of(lists.begin(), lists.end(),
                     [](const Tensors &each) { return needs_gradient(at::TensorList(each)); });
}

template <class Op, class Signature>
struct BelowAutograd;

template <class Op, class Result, class... Given>
struct BelowAutograd<Op, Result(Given...)> {
  static Result run(c10::DispatchKeySet keys, Given... given) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, "").template typed<Result(Given...)>();
    keys = keys & c10::after_autograd_keyset;
    if ((needs_gradient(given) || ...) && c10::GradMode::is_enabled())
      keys = keys.add(c10::DispatchKey::AutogradOther);  // whose kernel is the fallback
    return op.redispatch(keys, std::forward<Given>(given)...);
  }
};

// An op for which somebody else has a kernel keeps it. One that the installed torch does not have, or whose signature
// is another there, stays as it is.
template <class Op, class Signature>
void add_kernel(torch::Library &library) {
  try {
    const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, "");
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::AutogradCPU))
      library.impl(Op::name, &BelowAutograd<Op, Signature>::run);
  } catch (const c10::Error &) {
  }
}

#define X(op, signature)                              \
  struct op {                                         \
    static constexpr const char *name = "c10d::" #op; \
  };
PHALANX_C10D_OPS(X)
#undef X

}  // namespace

void add_autograd_kernels() {
  // It is never destroyed: other threads may call ops while the process exits.
  static auto *const library =
      new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::AutogradCPU, __FILE__, __LINE__);
#define X(op, signature) add_kernel<op, signature>(*library);
  PHALANX_C10D_OPS(X)
#undef X
}

}  // namespace phalanx
