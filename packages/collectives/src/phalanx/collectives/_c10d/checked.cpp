// Calls with wrong arguments: the error on this rank, and the notice to the others.
#include "checked.h"

#include <algorithm>

namespace phalanx {
namespace {

bool on_gpu(const at::Tensor &tensor) { return tensor.defined() && tensor.is_cuda(); }
template <class Item>
bool on_gpu(const std::vector<Item> &list) {
  return std::any_of(list.begin(), list.end(), [](const auto &item) { return on_gpu(item); });
}

}  // namespace

template <class Call>
C10dWork CheckedBackend::checked(const char *title, std::optional<Milliseconds> timeout, Call call) {
  core_was_called_ = false;
  try {
    return call();
  } catch (const c10::Error &error) {
    if (core_was_called_) throw;
    const std::string text = error.what_without_backtrace();
    if (timeout) engine().refuse(text, limit(*timeout), title);
    core_was_called_ = true;  // a collective that is made of others has told the ranks once
    if (dynamic_cast<const c10::ValueError *>(&error) == nullptr) throw;
    throw InvalidArgument({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
  }
}

template <class Call, class... Given>
C10dWork CheckedBackend::collective(const char *title, Milliseconds timeout, Call call, const Given &...given) {
  const bool tells = !(on_gpu(given) || ...);
  return checked(title, tells ? std::optional(timeout) : std::nullopt, std::move(call));
}

C10dWork CheckedBackend::allreduce(Tensors &tensors, const c10d::AllreduceOptions &opts) {
  return collective(
      "all_reduce", opts.timeout, [&] { return Backend::allreduce(tensors, opts); }, tensors);
}

C10dWork CheckedBackend::allreduce_coalesced(Tensors &tensors, const c10d::AllreduceCoalescedOptions &opts) {
  return collective(
      "all_reduce_coalesced", opts.timeout, [&] { return Backend::allreduce_coalesced(tensors, opts); }, tensors);
}

C10dWork CheckedBackend::broadcast(Tensors &tensors, const c10d::BroadcastOptions &opts) {
  return collective(
      "broadcast", opts.timeout, [&] { return Backend::broadcast(tensors, opts); }, tensors);
}

C10dWork CheckedBackend::reduce(Tensors &tensors, const c10d::ReduceOptions &opts) {
  return collective(
      "reduce", opts.timeout, [&] { return Backend::reduce(tensors, opts); }, tensors);
}

C10dWork CheckedBackend::allgather(TensorLists &outputs, Tensors &inputs, const c10d::AllgatherOptions &opts) {
  return collective(
      "all_gather", opts.timeout, [&] { return Backend::allgather(outputs, inputs, opts); }, outputs, inputs);
}

C10dWork CheckedBackend::_allgather_base(at::Tensor &output, at::Tensor &input, const c10d::AllgatherOptions &opts) {
  return collective(
      "all_gather_into_tensor", opts.timeout, [&] { return Backend::_allgather_base(output, input, opts); }, output,
      input);
}

C10dWork CheckedBackend::allgather_coalesced(TensorLists &outputs, Tensors &inputs,
                                             const c10d::AllgatherOptions &opts) {
  return collective(
      "all_gather_coalesced", opts.timeout, [&] { return Backend::allgather_coalesced(outputs, inputs, opts); },
      outputs, inputs);
}

C10dWork CheckedBackend::allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                                         const c10d::AllgatherOptions &opts) {
  return collective(
      "all_gather_into_tensor_coalesced", opts.timeout,
      [&] { return Backend::allgather_into_tensor_coalesced(outputs, inputs, opts); }, outputs, inputs);
}

C10dWork CheckedBackend::gather(TensorLists &outputs, Tensors &inputs, const c10d::GatherOptions &opts) {
  return collective(
      "gather", opts.timeout, [&] { return Backend::gather(outputs, inputs, opts); }, outputs, inputs);
}

#ifdef C10D_BACKEND_HAS_HOOKS
C10dWork CheckedBackend::gather_single(at::Tensor &output, at::Tensor &input, const c10d::GatherOptions &opts) {
  return collective(
      "gather", opts.timeout, [&] { return Backend::gather_single(output, input, opts); }, output, input);
}
#endif

C10dWork CheckedBackend::scatter(Tensors &outputs, TensorLists &inputs, const c10d::ScatterOptions &opts) {
  return collective(
      "scatter", opts.timeout, [&] { return Backend::scatter(outputs, inputs, opts); }, outputs, inputs);
}

C10dWork CheckedBackend::reduce_scatter(Tensors &outputs, TensorLists &inputs, const c10d::ReduceScatterOptions &opts) {
  return collective(
      "reduce_scatter", opts.timeout, [&] { return Backend::reduce_scatter(outputs, inputs, opts); }, outputs, inputs);
}

C10dWork CheckedBackend::_reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                              const c10d::ReduceScatterOptions &opts) {
  return collective(
      "reduce_scatter_tensor", opts.timeout, [&] { return Backend::_reduce_scatter_base(output, input, opts); }, output,
      input);
}

C10dWork CheckedBackend::reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                                         const c10d::ReduceScatterOptions &opts) {
  return collective(
      "reduce_scatter_tensor_coalesced", opts.timeout,
      [&] { return Backend::reduce_scatter_tensor_coalesced(outputs, inputs, opts); }, outputs, inputs);
}

C10dWork CheckedBackend::alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &output_splits,
                                       std::vector<int64_t> &input_splits, const c10d::AllToAllOptions &opts) {
  return collective(
      "all_to_all_single", opts.timeout,
      [&] { return Backend::alltoall_base(output, input, output_splits, input_splits, opts); }, output, input);
}

C10dWork CheckedBackend::alltoall(Tensors &outputs, Tensors &inputs, const c10d::AllToAllOptions &opts) {
  return collective(
      "all_to_all", opts.timeout, [&] { return Backend::alltoall(outputs, inputs, opts); }, outputs, inputs);
}

C10dWork CheckedBackend::send(Tensors &tensors, int peer, int tag) {
  return checked("send", std::nullopt, [&] { return Backend::send(tensors, peer, tag); });
}

C10dWork CheckedBackend::recv(Tensors &tensors, int peer, int tag) {
  return checked("recv", std::nullopt, [&] { return Backend::recv(tensors, peer, tag); });
}

C10dWork CheckedBackend::recvAnysource(Tensors &tensors, int tag) {
  return checked("recv_anysource", std::nullopt, [&] { return Backend::recvAnysource(tensors, tag); });
}

}  // namespace phalanx
