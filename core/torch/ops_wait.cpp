// wait_tensor and wait_tensor_: for work of ours by the pending table, for work of torch.distributed by its own op.
#include "call.h"
#include "library.h"

namespace phxt {
namespace {

// Gives the tensor back.
Tensor wait(Tensor tensor) {
  bool found = false;
  check_kept(wait_storage(storage_base(tensor), 0, &found));
  // torch's table is asked when ours had nothing, and whenever this process ever sent a collective there: one storage
  // may hold results of both. Its op takes the tensor and returns it.
  if (found && fallback_count() == 0) return tensor;
  StableIValue stack[] = {tensor.release()};
  check_torch(torch_call_dispatcher("_c10d_functional::wait_tensor", "", stack, kTorchVersion),
              "wait for a tensor in torch.distributed");
  return Tensor(stack[0]);
}

}  // namespace

void wait_tensor(StableIValue *stack, uint64_t, uint64_t) { stack[0] = wait(Tensor(stack[0])).release(); }

void wait_tensor_(StableIValue *stack, uint64_t, uint64_t) { wait(Tensor(stack[0])); }

}  // namespace phxt
