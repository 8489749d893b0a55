// The backend that torch calls. It handles calls with wrong arguments.
#pragma once

#include "backend.h"

namespace phalanx {

// Wrong arguments are found before anything is sent. Arguments may be wrong on one rank and right on another, which
// would wait for this one; so the other ranks are told, as the core does when it refuses a call itself. They are not
// told of messages, which belong to no call of another rank by their order, nor of calls with tensors of GPUs, whose
// kernels compare the calls themselves.
class CheckedBackend final : public Backend {
 public:
  using Backend::Backend;

  C10dWork allreduce(Tensors &tensors, const c10d::AllreduceOptions &opts) override;
  C10dWork allreduce_coalesced(Tensors &tensors, const c10d::AllreduceCoalescedOptions &opts) override;
  C10dWork broadcast(Tensors &tensors, const c10d::BroadcastOptions &opts) override;
  C10dWork reduce(Tensors &tensors, const c10d::ReduceOptions &opts) override;
  C10dWork allgather(TensorLists &outputs, Tensors &inputs, const c10d::AllgatherOptions &opts) override;
  C10dWork _allgather_base(at::Tensor &output, at::Tensor &input, const c10d::AllgatherOptions &opts) override;
  C10dWork allgather_coalesced(TensorLists &outputs, Tensors &inputs, const c10d::AllgatherOptions &opts) override;
  C10dWork allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                           const c10d::AllgatherOptions &opts) override;
  C10dWork gather(TensorLists &outputs, Tensors &inputs, const c10d::GatherOptions &opts) override;
  C10dWork scatter(Tensors &outputs, TensorLists &inputs, const c10d::ScatterOptions &opts) override;
  C10dWork reduce_scatter(Tensors &outputs, TensorLists &inputs, const c10d::ReduceScatterOptions &opts) override;
  C10dWork _reduce_scatter_base(at::Tensor &output, at::Tensor &input, const c10d::ReduceScatterOptions &opts) override;
  C10dWork reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                           const c10d::ReduceScatterOptions &opts) override;
  C10dWork alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &output_splits,
                         std::vector<int64_t> &input_splits, const c10d::AllToAllOptions &opts) override;
  C10dWork alltoall(Tensors &outputs, Tensors &inputs, const c10d::AllToAllOptions &opts) override;
#ifdef C10D_BACKEND_HAS_HOOKS
  C10dWork gather_single(at::Tensor &output, at::Tensor &input, const c10d::GatherOptions &opts) override;
#endif
  C10dWork send(Tensors &tensors, int peer, int tag) override;
  C10dWork recv(Tensors &tensors, int peer, int tag) override;
  C10dWork recvAnysource(Tensors &tensors, int tag) override;

 private:
  // Runs `call`. Raises InvalidArgument where it raises ValueError, and tells the other ranks if `timeout` is given.
  template <class Call>
  C10dWork checked(const char *title, std::optional<Milliseconds> timeout, Call call);
  // The same for a collective of these tensors.
  template <class Call, class... Given>
  C10dWork collective(const char *title, Milliseconds timeout, Call call, const Given &...given);
};

}  // namespace phalanx
