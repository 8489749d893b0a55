// The collectives of the backend: torch's arguments, checked, as calls of the core.
#include <algorithm>

#include "backend.h"
#include "tensors.h"

namespace phalanx {
namespace {

using c10d::OpType;

// The type of such a work. Torch 2.11 has no type of its own for it.
template <class Type>
constexpr auto scattered(int) -> decltype(Type::REDUCE_SCATTER_TENSOR_COALESCED) {
  return Type::REDUCE_SCATTER_TENSOR_COALESCED;
}
template <class Type>
constexpr Type scattered(...) {
  return Type::COALESCED;
}

// One call of a coalesced group.
phx_call call_of(int32_t kind, const void *in, void *out, const Elements &elements, int32_t op) {
  phx_call call{};
  call.struct_size = sizeof call;
  call.kind = kind;
  call.in = in;
  call.out = out;
  call.count = elements.count;
  call.dtype = elements.dtype;
  call.op = op;
  return call;
}

void check_tensors(const Tensors &tensors, const at::Tensor &like, const char *what) {
  for (const at::Tensor &tensor : tensors) {
    check_tensor(tensor, what);
    check_same_dtype(tensor, like, what);
  }
}

// Whether two pairs of output and input are the same.
MayShare repeated(const Tensors &outputs, const Tensors &inputs) {
  return [&](size_t i, size_t j) { return same_view(outputs[i], outputs[j]) && same_view(inputs[i], inputs[j]); };
}

}  // namespace

int Backend::root(int64_t rank, const char *what) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size_, what, ": the root is rank ", rank,
                    " of the group, whose ranks are 0 to ", size_ - 1);
  return static_cast<int>(rank);
}

void Backend::check_list(size_t count, const char *what) const {
  TORCH_CHECK_VALUE(count == static_cast<size_t>(size_), what, ": a list has ", count, " tensors; give ", size_,
                    ", one for each rank");
}

C10dWork Backend::allreduce(Tensors &tensors, const c10d::AllreduceOptions &opts) {
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
  const at::Tensor &tensor = only(tensors, "all_reduce");
  const Reduction reduction = reduction_of(opts.reduceOp, "all_reduce");
  const int32_t dtype = reduced_dtype(tensor, "all_reduce");
  const Recording recording =
      record([&] { return Comms{"allreduce", tensors, tensors, tensor.numel(), tensor.numel(), opts.asyncOp}; });
  Buffers buffers;
  buffers.outputs = tensors;
  void *data = readable_and_writable(tensor, buffers);
  const auto call = [&, n = static_cast<size_t>(tensor.numel())](auto *group, auto *options, auto **work) {
    return core().all_reduce(group, data, data, n, dtype, reduction.op, options, work);
  };
  const Plan plan{OpType::ALLREDUCE, "phalanx:all_reduce", opts.timeout, opts.asyncOp, reduction.scale};
  return issue(plan, std::move(buffers), call);
}

C10dWork Backend::allreduce_coalesced(Tensors &tensors, const c10d::AllreduceCoalescedOptions &opts) {
  const Reduction reduction = reduction_of(opts.reduceOp, "all_reduce_coalesced");
  for (const at::Tensor &tensor : tensors) check_tensor(tensor, "all_reduce_coalesced");
  const Recording recording = record([&] {
    return Comms{"allreduce_coalesced", tensors, tensors, numel_of(tensors), numel_of(tensors), opts.asyncOp};
  });
  Buffers buffers;
  buffers.outputs = tensors;
  // An element that is in two tensors has the same sum in both.
  buffers.staged = share_memory(tensors, [&](size_t i, size_t j) {
    const at::Tensor &a = tensors[i], &b = tensors[j];
    return a.scalar_type() == b.scalar_type() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
  });
  std::vector<phx_call> calls;
  for (const at::Tensor &tensor : tensors) {
    void *data = readable_and_writable(tensor, buffers);
    const Elements elements{reduced_dtype(tensor, "all_reduce_coalesced"), static_cast<size_t>(tensor.numel())};
    calls.push_back(call_of(PHX_CALL_ALL_REDUCE, data, data, elements, reduction.op));
  }
  const Plan plan{OpType::ALLREDUCE_COALESCED, "phalanx:all_reduce_coalesced", opts.timeout, opts.asyncOp,
                  reduction.scale};
  return issue_coalesced(plan, std::move(buffers), std::move(calls));
}

C10dWork Backend::broadcast(Tensors &tensors, const c10d::BroadcastOptions &opts) {
  const at::Tensor &tensor = only(tensors, "broadcast");
  const int from = root(opts.rootRank, "broadcast");
  const Recording recording =
      record([&] { return Comms{"broadcast", tensors, tensors, tensor.numel(), tensor.numel(), opts.asyncOp, from}; });
  Buffers buffers;
  buffers.outputs = tensors;
  void *data = from == rank_ ? const_cast<void *>(readable(tensor, buffers)) : writable(tensor, buffers);
  const auto call = [&, elements = elements_of(tensor)](auto *group, auto *options, auto **work) {
    return core().broadcast(group, data, elements.count, elements.dtype, from, options, work);
  };
  return issue({OpType::BROADCAST, "phalanx:broadcast", opts.timeout, opts.asyncOp}, std::move(buffers), call);
}

C10dWork Backend::reduce(Tensors &tensors, const c10d::ReduceOptions &opts) {
  const at::Tensor &tensor = only(tensors, "reduce");
  const int to = root(opts.rootRank, "reduce");
  const Reduction reduction = reduction_of(opts.reduceOp, "reduce");
  const int32_t dtype = reduced_dtype(tensor, "reduce");
  const Recording recording =
      record([&] { return Comms{"reduce", tensors, tensors, tensor.numel(), tensor.numel(), opts.asyncOp, to}; });
  Buffers buffers;
  buffers.outputs = tensors;
  const void *in = to == rank_ ? readable_and_writable(tensor, buffers) : readable(tensor, buffers);
  void *out = to == rank_ ? const_cast<void *>(in) : nullptr;
  const auto call = [&, n = static_cast<size_t>(tensor.numel())](auto *group, auto *options, auto **work) {
    return core().reduce(group, in, out, n, dtype, reduction.op, to, options, work);
  };
  const Plan plan{OpType::REDUCE, "phalanx:reduce", opts.timeout, opts.asyncOp, reduction.scale};
  return issue(plan, std::move(buffers), call);
}

C10dWork Backend::allgather(TensorLists &outputs, Tensors &inputs, const c10d::AllgatherOptions &opts) {
  const at::Tensor &input = only(inputs, "all_gather");
  TORCH_CHECK_VALUE(outputs.size() == 1, "all_gather: expected one list of outputs, got ", outputs.size());
  Tensors &list = outputs[0];
  check_list(list.size(), "all_gather");
  check_tensors(list, input, "all_gather");
  TORCH_CHECK_VALUE(list[rank_].numel() == input.numel(), "all_gather: the input has ", input.numel(),
                    " elements, and the output for this rank ", list[rank_].numel(),
                    "; they must have the same number");
  const Recording recording =
      record([&] { return Comms{"all_gather", inputs, list, input.numel(), numel_of(list), opts.asyncOp}; });
  Buffers buffers;
  buffers.outputs = list;
  const List out = writable(list, written_, buffers);
  List in = alone(input, readable(input, buffers));
  copy_overlapping(in, out, rank_, buffers);
  const auto call = [&](auto *group, auto *options, auto **work) {
    const void *from = in.blocks[0].data;
    if (!out.flat) return core().all_gather_blocks(group, from, out.blocks.data(), in.dtype, options, work);
    if (!out.even()) return core().all_gather_v(group, from, out.start(), out.counts().data(), in.dtype, options, work);
    return core().all_gather(group, from, out.start(), in.blocks[0].count, in.dtype, options, work);
  };
  return issue({OpType::ALLGATHER, "phalanx:all_gather", opts.timeout, opts.asyncOp}, std::move(buffers), call);
}

C10dWork Backend::_allgather_base(at::Tensor &output, at::Tensor &input, const c10d::AllgatherOptions &opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  Buffers buffers;
  check_tensor(output, "all_gather_into_tensor");
  check_tensor(input, "all_gather_into_tensor");
  check_same_dtype(output, input, "all_gather_into_tensor");
  TORCH_CHECK_VALUE(output.numel() == size_ * input.numel(), "all_gather_into_tensor: the output has ", output.numel(),
                    " elements and needs ", size_, " times the ", input.numel(), " of the input");
  const Recording recording =
      record([&] { return Comms{"_allgather_base", inputs, outputs, input.numel(), output.numel(), opts.asyncOp}; });
  buffers.outputs = outputs;
  void *out = writable(output, buffers);
  const void *in = copy_if_overlapping(readable(input, buffers), input.nbytes(), out, output.nbytes(), buffers);
  const auto call = [&, elements = elements_of(input)](auto *group, auto *options, auto **work) {
    return core().all_gather(group, in, out, elements.count, elements.dtype, options, work);
  };
  const Plan plan{OpType::_ALLGATHER_BASE, "phalanx:all_gather_into_tensor", opts.timeout, opts.asyncOp};
  return issue(plan, std::move(buffers), call);
}

C10dWork Backend::allgather_coalesced(TensorLists &outputs, Tensors &inputs, const c10d::AllgatherOptions &opts) {
  const char *const what = "all_gather_coalesced";
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_), what, ": ", size_,
                    " lists of outputs are needed, one for each rank, not ", outputs.size());
  const size_t count = inputs.size();
  const Recording recording = record([&] {
    Comms comms{"allgather_coalesced", inputs, {}, numel_of(inputs), 0, opts.asyncOp};
    for (const Tensors &list : outputs) comms.outputs.insert(comms.outputs.end(), list.begin(), list.end());
    comms.out_count = numel_of(comms.outputs);
    return comms;
  });
  Buffers buffers;
  for (const Tensors &list : outputs) {
    TORCH_CHECK_VALUE(list.size() == count, what, ": a list of outputs has ", list.size(), " tensors for ", count,
                      " inputs; give one for each input");
    for (size_t i = 0; i < count; ++i) {
      check_tensor(inputs[i], what);
      check_tensor(list[i], what);
      check_same_dtype(list[i], inputs[i], what);
      TORCH_CHECK_VALUE(list[i].numel() == inputs[i].numel(), what, ": an output has ", list[i].numel(),
                        " elements, and its input ", inputs[i].numel(), "; they must have the same number");
    }
    buffers.outputs.insert(buffers.outputs.end(), list.begin(), list.end());
  }
  buffers.staged = share_memory(buffers.outputs, [&](size_t i, size_t j) {  // one input twice, into the same outputs
    return i / count == j / count && same_view(inputs[i % count], inputs[j % count]) &&
           same_view(buffers.outputs[i], buffers.outputs[j]);
  });
  std::vector<phx_call> calls;
  for (size_t i = 0; i < count; ++i) {
    Tensors blocks;
    for (const Tensors &list : outputs) blocks.push_back(list[i]);
    void *out = in_one_buffer(blocks, buffers).start();
    const void *in = readable(inputs[i], buffers);
    calls.push_back(call_of(PHX_CALL_ALL_GATHER, in, out, elements_of(inputs[i]), 0));
  }
  const Plan plan{OpType::ALLGATHER_COALESCED, "phalanx:all_gather_coalesced", opts.timeout, opts.asyncOp};
  return issue_coalesced(plan, std::move(buffers), std::move(calls));
}

C10dWork Backend::allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                                  const c10d::AllgatherOptions &opts) {
  const char *const what = "all_gather_into_tensor_coalesced";
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), what, ": ", outputs.size(), " outputs for ", inputs.size(),
                    " inputs; give one output for each input");
  const Recording recording = record([&] {
    return Comms{"allgather_into_tensor_coalesced", inputs, outputs, numel_of(inputs), numel_of(outputs), opts.asyncOp};
  });
  Buffers buffers;
  buffers.outputs = outputs;
  std::vector<phx_call> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], what);
    check_tensor(outputs[i], what);
    check_same_dtype(outputs[i], inputs[i], what);
    TORCH_CHECK_VALUE(outputs[i].numel() == size_ * inputs[i].numel(), what, ": output ", i, " has ",
                      outputs[i].numel(), " elements and needs ", size_, " times the ", inputs[i].numel(),
                      " of its input");
  }
  buffers.staged = share_memory(outputs, repeated(outputs, inputs));
  for (size_t i = 0; i < inputs.size(); ++i) {
    void *out = writable(outputs[i], buffers);
    const void *in = readable(inputs[i], buffers);
    calls.push_back(call_of(PHX_CALL_ALL_GATHER, in, out, elements_of(inputs[i]), 0));
  }
  const Plan plan{OpType::COALESCED, "phalanx:all_gather_into_tensor_coalesced", opts.timeout, opts.asyncOp};
  return issue_coalesced(plan, std::move(buffers), std::move(calls));
}

C10dWork Backend::gather(TensorLists &outputs, Tensors &inputs, const c10d::GatherOptions &opts) {
  const at::Tensor &input = only(inputs, "gather");
  const int to = root(opts.rootRank, "gather");
  const Recording recording = record([&] {
    return Comms{"gather",     inputs, outputs.empty() ? inputs : outputs[0], input.numel(), input.numel() * size_,
                 opts.asyncOp, to};
  });
  Buffers buffers;
  List out, in = alone(input, readable(input, buffers));
  if (to == rank_) {
    TORCH_CHECK_VALUE(outputs.size() == 1, "gather: the root must give one list of outputs, not ", outputs.size());
    check_list(outputs[0].size(), "gather");
    check_tensors(outputs[0], input, "gather");
    for (const at::Tensor &each : outputs[0])
      TORCH_CHECK_VALUE(each.numel() == input.numel(), "gather: an output has ", each.numel(),
                        " elements, and the input ", input.numel(), "; they must have the same number");
    buffers.outputs = outputs[0];
    out = writable(outputs[0], written_, buffers);
    copy_overlapping(in, out, rank_, buffers);
  } else {
    TORCH_CHECK_VALUE(outputs.empty() || outputs[0].empty(), "gather: rank ", rank_,
                      " of the group is not the root, so it must give no outputs");
  }
  const auto call = [&](auto *group, auto *options, auto **work) {
    const phx_block &from = in.blocks[0];
    if (!input.is_cuda())
      return core().gather_blocks(group, from.data, out.blocks.data(), from.count, in.dtype, to, options, work);
    return core().gather(group, from.data, out.start(), from.count, in.dtype, to, options, work);
  };
  return issue({OpType::GATHER, "phalanx:gather", opts.timeout, opts.asyncOp}, std::move(buffers), call);
}

C10dWork Backend::scatter(Tensors &outputs, TensorLists &inputs, const c10d::ScatterOptions &opts) {
  const at::Tensor &output = only(outputs, "scatter");
  const int from = root(opts.rootRank, "scatter");
  const Recording recording = record([&] {
    return Comms{
        "scatter", inputs.empty() ? outputs : inputs[0], outputs, output.numel() * size_, output.numel(), opts.asyncOp,
        from};
  });
  Buffers buffers;
  buffers.outputs = outputs;
  const List out = alone(output, writable(output, buffers));
  List in;
  if (from == rank_) {
    TORCH_CHECK_VALUE(inputs.size() == 1, "scatter: the root must give one list of inputs, not ", inputs.size());
    check_list(inputs[0].size(), "scatter");
    check_tensors(inputs[0], output, "scatter");
    for (const at::Tensor &each : inputs[0])
      TORCH_CHECK_VALUE(each.numel() == output.numel(), "scatter: an input has ", each.numel(),
                        " elements, and the output ", output.numel(), "; they must have the same number");
    in = readable(inputs[0], read_, buffers);
    copy_overlapping(in, out, rank_, buffers);
  } else {
    TORCH_CHECK_VALUE(inputs.empty() || inputs[0].empty(), "scatter: rank ", rank_,
                      " of the group is not the root, so it must give no inputs");
  }
  const auto call = [&](auto *group, auto *options, auto **work) {
    const phx_block &to = out.blocks[0];
    if (!output.is_cuda())
      return core().scatter_blocks(group, in.blocks.data(), to.data, to.count, out.dtype, from, options, work);
    return core().scatter(group, in.start(), to.data, to.count, out.dtype, from, options, work);
  };
  return issue({OpType::SCATTER, "phalanx:scatter", opts.timeout, opts.asyncOp}, std::move(buffers), call);
}

C10dWork Backend::reduce_scatter(Tensors &outputs, TensorLists &inputs, const c10d::ReduceScatterOptions &opts) {
  const at::Tensor &output = only(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1, "reduce_scatter: expected one list of inputs, got ", inputs.size());
  Tensors &list = inputs[0];
  check_list(list.size(), "reduce_scatter");
  check_tensors(list, output, "reduce_scatter");
  TORCH_CHECK_VALUE(list[rank_].numel() == output.numel(), "reduce_scatter: the output has ", output.numel(),
                    " elements, and the input for this rank ", list[rank_].numel(), "; they must have the same number");
  const Reduction reduction = reduction_of(opts.reduceOp, "reduce_scatter");
  const int32_t dtype = reduced_dtype(output, "reduce_scatter");
  const Recording recording =
      record([&] { return Comms{"reduce_scatter", list, outputs, numel_of(list), output.numel(), opts.asyncOp}; });
  Buffers buffers;
  buffers.outputs = outputs;
  const List out = alone(output, writable(output, buffers));
  List in = readable(list, read_, buffers);
  copy_overlapping(in, out, rank_, buffers);
  const auto call = [&](auto *group, auto *options, auto **work) {
    void *const to = out.start();
    if (!in.flat) return core().reduce_scatter_blocks(group, in.blocks.data(), to, dtype, reduction.op, options, work);
    if (!in.even())
      return core().reduce_scatter_v(group, in.start(), to, in.counts().data(), dtype, reduction.op, options, work);
    return core().reduce_scatter(group, in.start(), to, in.blocks[0].count, dtype, reduction.op, options, work);
  };
  const Plan plan{OpType::REDUCE_SCATTER, "phalanx:reduce_scatter", opts.timeout, opts.asyncOp, reduction.scale};
  return issue(plan, std::move(buffers), call);
}

C10dWork Backend::_reduce_scatter_base(at::Tensor &output, at::Tensor &input, const c10d::ReduceScatterOptions &opts) {
  const char *const what = "reduce_scatter_tensor";
  check_tensor(output, what);
  check_tensor(input, what);
  check_same_dtype(output, input, what);
  TORCH_CHECK_VALUE(input.numel() == size_ * output.numel(), what, ": the input has ", input.numel(),
                    " elements and needs ", size_, " times the ", output.numel(), " of the output");
  const Reduction reduction = reduction_of(opts.reduceOp, what);
  const int32_t dtype = reduced_dtype(output, what);
  const Recording recording = record(
      [&] { return Comms{"_reduce_scatter_base", {input}, {output}, input.numel(), output.numel(), opts.asyncOp}; });
  Buffers buffers;
  buffers.outputs = {output};
  void *out = writable(output, buffers);
  const void *in = copy_if_overlapping(readable(input, buffers), input.nbytes(), out, output.nbytes(), buffers);
  const auto call = [&, n = static_cast<size_t>(output.numel())](auto *group, auto *options, auto **work) {
    return core().reduce_scatter(group, in, out, n, dtype, reduction.op, options, work);
  };
  const Plan plan{OpType::_REDUCE_SCATTER_BASE, "phalanx:reduce_scatter_tensor", opts.timeout, opts.asyncOp,
                  reduction.scale};
  return issue(plan, std::move(buffers), call);
}

C10dWork Backend::reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                                  const c10d::ReduceScatterOptions &opts) {
  const char *const what = "reduce_scatter_tensor_coalesced";
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), what, ": ", outputs.size(), " outputs for ", inputs.size(),
                    " inputs; give one output for each input");
  const Reduction reduction = reduction_of(opts.reduceOp, what);
  const Recording recording = record([&] {
    return Comms{"reduce_scatter_tensor_coalesced", inputs, outputs, numel_of(inputs), numel_of(outputs), opts.asyncOp};
  });
  Buffers buffers;
  buffers.outputs = outputs;
  std::vector<phx_call> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], what);
    check_tensor(outputs[i], what);
    check_same_dtype(outputs[i], inputs[i], what);
    TORCH_CHECK_VALUE(inputs[i].numel() == size_ * outputs[i].numel(), what, ": input ", i, " has ", inputs[i].numel(),
                      " elements and needs ", size_, " times the ", outputs[i].numel(), " of its output");
  }
  buffers.staged = share_memory(outputs, repeated(outputs, inputs));
  for (size_t i = 0; i < inputs.size(); ++i) {
    void *out = writable(outputs[i], buffers);
    const void *in = readable(inputs[i], buffers);
    const Elements elements{reduced_dtype(outputs[i], what), static_cast<size_t>(outputs[i].numel())};
    calls.push_back(call_of(PHX_CALL_REDUCE_SCATTER, in, out, elements, reduction.op));
  }
  const Plan plan{scattered<OpType>(0), "phalanx:reduce_scatter_tensor_coalesced", opts.timeout, opts.asyncOp,
                  reduction.scale};
  return issue_coalesced(plan, std::move(buffers), std::move(calls));
}

}  // namespace phalanx
