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
  return {sizeof(phx_call), kind, in, out, elements.count, elements.dtype, op, 0, 0};
}

void check_pair(const at::Tensor &output, const at::Tensor &input, const char *what) {
  check_tensor(output, what);
  check_tensor(input, what);
  check_same_dtype(output, input, what);
}

}  // namespace

int Backend::root(int64_t rank, const char *what) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size_, what, ": the root is rank ", rank,
                    " of the group, whose ranks are 0 to ", size_ - 1);
  return static_cast<int>(rank);
}

void Backend::check_list(const Tensors &list, at::TensorList like, const char *what) const {
  TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(size_), what, ": a list has ", list.size(), " tensors; give ",
                    size_, ", one for each rank");
  for (const at::Tensor &tensor : list) {
    check_tensor(tensor, what);
    check_same_dtype(tensor, like[0], what);
  }
}

Tensors &Backend::list_of_all(TensorLists &lists, const at::Tensor &own, const Sides &sides, const char *what) const {
  TORCH_CHECK_VALUE(lists.size() == 1, what, ": expected one list of ", sides.list, "s, got ", lists.size());
  check_list(lists[0], own, what);
  const int64_t numel = lists[0][rank_].numel();
  TORCH_CHECK_VALUE(numel == own.numel(), what, ": the ", sides.own, " has ", own.numel(), " elements, and the ",
                    sides.list, " for this rank ", numel, "; they must have the same number");
  return lists[0];
}

Tensors *Backend::list_of_root(TensorLists &lists, const at::Tensor &own, const Sides &sides, int root,
                               const char *what) const {
  if (root != rank_) {
    TORCH_CHECK_VALUE(lists.empty() || lists[0].empty(), what, ": rank ", rank_,
                      " of the group is not the root, so it must give no ", sides.list, "s");
    return nullptr;
  }
  TORCH_CHECK_VALUE(lists.size() == 1, what, ": the root must give one list of ", sides.list, "s, not ", lists.size());
  check_list(lists[0], own, what);
  for (const at::Tensor &each : lists[0])
    TORCH_CHECK_VALUE(each.numel() == own.numel(), what, ": an ", sides.list, " has ", each.numel(),
                      " elements, and the ", sides.own, " ", own.numel(), "; they must have the same number");
  return &lists[0];
}

C10dWork Backend::allreduce(Tensors &tensors, const c10d::AllreduceOptions &opts) {
  const Plan plan{OpType::ALLREDUCE, "phalanx:all_reduce", "allreduce", opts.timeout, opts.asyncOp};
  return checked(plan, tensors, tensors, [&] {
    if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
    const at::Tensor &tensor = only(tensors, plan.what());
    const Reduction reduction = reduction_of(opts.reduceOp, plan.what());
    const Elements elements = reduced_elements(tensor, plan.what());
    const Recording recording = record(plan, tensors, tensors);
    Buffers buffers;
    buffers.outputs = tensors;
    void *data = readable_and_writable(tensor, buffers);
    const auto call = [&](auto *group, auto *options, auto **work) {
      return core().all_reduce(group, data, data, elements.count, elements.dtype, reduction.op, options, work);
    };
    return issue(plan, std::move(buffers), call, reduction.scale);
  });
}

C10dWork Backend::allreduce_coalesced(Tensors &tensors, const c10d::AllreduceCoalescedOptions &opts) {
  const Plan plan{OpType::ALLREDUCE_COALESCED, "phalanx:all_reduce_coalesced", "allreduce_coalesced", opts.timeout,
                  opts.asyncOp};
  return checked(plan, tensors, tensors, [&] {
    const Reduction reduction = reduction_of(opts.reduceOp, plan.what());
    for (const at::Tensor &tensor : tensors) check_tensor(tensor, plan.what());
    const Recording recording = record(plan, tensors, tensors);
    Buffers buffers;
    buffers.outputs = tensors;
    // An element that is in two tensors has the same sum in both.
    buffers.staged = share_memory(tensors, [&](size_t i, size_t j) {
      const at::Tensor &a = tensors[i], &b = tensors[j];
      return a.scalar_type() == b.scalar_type() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
    });
    Calls calls;
    for (const at::Tensor &tensor : tensors) {
      void *data = readable_and_writable(tensor, buffers);
      const Elements elements = reduced_elements(tensor, plan.what());
      calls.push_back(call_of(PHX_CALL_ALL_REDUCE, data, data, elements, reduction.op));
    }
    return issue_calls(plan, std::move(buffers), calls, reduction.scale);
  });
}

C10dWork Backend::broadcast(Tensors &tensors, const c10d::BroadcastOptions &opts) {
  const Plan plan{OpType::BROADCAST, "phalanx:broadcast", "broadcast", opts.timeout, opts.asyncOp};
  return checked(plan, tensors, tensors, [&] {
    const at::Tensor &tensor = only(tensors, plan.what());
    const int from = root(opts.rootRank, plan.what());
    const Recording recording = record(plan, tensors, tensors, from);
    Buffers buffers;
    buffers.outputs = tensors;
    void *data = from == rank_ ? const_cast<void *>(readable(tensor, buffers)) : writable(tensor, buffers);
    const auto call = [&, elements = elements_of(tensor)](auto *group, auto *options, auto **work) {
      return core().broadcast(group, data, elements.count, elements.dtype, from, options, work);
    };
    return issue(plan, std::move(buffers), call);
  });
}

C10dWork Backend::reduce(Tensors &tensors, const c10d::ReduceOptions &opts) {
  const Plan plan{OpType::REDUCE, "phalanx:reduce", "reduce", opts.timeout, opts.asyncOp};
  return checked(plan, tensors, tensors, [&] {
    const at::Tensor &tensor = only(tensors, plan.what());
    const int to = root(opts.rootRank, plan.what());
    const Reduction reduction = reduction_of(opts.reduceOp, plan.what());
    const Elements elements = reduced_elements(tensor, plan.what());
    const Recording recording = record(plan, tensors, tensors, to);
    Buffers buffers;
    buffers.outputs = tensors;
    void *out = to == rank_ ? readable_and_writable(tensor, buffers) : nullptr;
    const void *in = to == rank_ ? out : readable(tensor, buffers);
    const auto call = [&](auto *group, auto *options, auto **work) {
      return core().reduce(group, in, out, elements.count, elements.dtype, reduction.op, to, options, work);
    };
    return issue(plan, std::move(buffers), call, reduction.scale);
  });
}

C10dWork Backend::allgather(TensorLists &outputs, Tensors &inputs, const c10d::AllgatherOptions &opts) {
  const Plan plan{OpType::ALLGATHER, "phalanx:all_gather", "all_gather", opts.timeout, opts.asyncOp};
  return checked(plan, outputs, inputs, [&] {
    const at::Tensor &input = only(inputs, plan.what());
    const Tensors &list = list_of_all(outputs, input, {"output", "input"}, plan.what());
    const Recording recording = record(plan, inputs, list);
    Buffers buffers;
    buffers.outputs = list;
    const List out = writable(list, written_, buffers);
    List in = alone(input, readable(input, buffers));
    copy_overlapping(in, out, rank_, buffers);
    const auto call = [&](auto *group, auto *options, auto **work) {
      const phx_block &from = in.blocks[0];
      if (!out.flat) return core().all_gather_blocks(group, from.data, out.blocks.data(), in.dtype, options, work);
      if (out.even()) return core().all_gather(group, from.data, out.start(), from.count, in.dtype, options, work);
      return core().all_gather_v(group, from.data, out.start(), out.counts().data(), in.dtype, options, work);
    };
    return issue(plan, std::move(buffers), call);
  });
}

C10dWork Backend::allgather_coalesced(TensorLists &outputs, Tensors &inputs, const c10d::AllgatherOptions &opts) {
  const Plan plan{OpType::ALLGATHER_COALESCED, "phalanx:all_gather_coalesced", "allgather_coalesced", opts.timeout,
                  opts.asyncOp};
  return checked(plan, outputs, inputs, [&] {
    const char *const what = plan.what();
    TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_), what, ": ", size_,
                      " lists of outputs are needed, one for each rank, not ", outputs.size());
    const size_t count = inputs.size();
    Buffers buffers;
    for (const Tensors &list : outputs) {
      TORCH_CHECK_VALUE(list.size() == count, what, ": a list of outputs has ", list.size(), " tensors for ", count,
                        " inputs; give one for each input");
      for (size_t i = 0; i < count; ++i) {
        check_pair(list[i], inputs[i], what);
        TORCH_CHECK_VALUE(list[i].numel() == inputs[i].numel(), what, ": an output has ", list[i].numel(),
                          " elements, and its input ", inputs[i].numel(), "; they must have the same number");
      }
      buffers.outputs.insert(buffers.outputs.end(), list.begin(), list.end());
    }
    const Recording recording = record(plan, inputs, buffers.outputs);
    buffers.staged = share_memory(buffers.outputs, [&](size_t i, size_t j) {  // one input twice, into the same outputs
      return i / count == j / count && same_view(inputs[i % count], inputs[j % count]) &&
             same_view(buffers.outputs[i], buffers.outputs[j]);
    });
    Calls calls;
    for (size_t i = 0; i < count; ++i) {
      Tensors blocks;
      for (const Tensors &list : outputs) blocks.push_back(list[i]);
      void *out = in_one_buffer(blocks, buffers).start();
      const void *in = readable(inputs[i], buffers);
      calls.push_back(call_of(PHX_CALL_ALL_GATHER, in, out, elements_of(inputs[i]), 0));
    }
    for (size_t i = 0; i < count; ++i)
      for (size_t j = 0; j < count; ++j)
        calls[i].in =
            copy_if_overlapping(calls[i].in, inputs[i].nbytes(), calls[j].out, size_ * inputs[j].nbytes(), buffers);
    return issue_calls(plan, std::move(buffers), calls);
  });
}

C10dWork Backend::gather(TensorLists &outputs, Tensors &inputs, const c10d::GatherOptions &opts) {
  const Plan plan{OpType::GATHER, "phalanx:gather", "gather", opts.timeout, opts.asyncOp};
  return checked(plan, outputs, inputs, [&] {
    const at::Tensor &input = only(inputs, plan.what());
    const int to = root(opts.rootRank, plan.what());
    const Recording recording = record(plan, inputs, outputs.empty() ? inputs : outputs[0], to);
    Buffers buffers;
    List out, in = alone(input, readable(input, buffers));
    if (const Tensors *list = list_of_root(outputs, input, {"output", "input"}, to, plan.what())) {
      buffers.outputs = *list;
      out = writable(*list, written_, buffers);
      copy_overlapping(in, out, rank_, buffers);
    }
    const auto call = [&](auto *group, auto *options, auto **work) {
      const phx_block &from = in.blocks[0];
      if (!input.is_cuda())
        return core().gather_blocks(group, from.data, out.blocks.data(), from.count, in.dtype, to, options, work);
      return core().gather(group, from.data, out.start(), from.count, in.dtype, to, options, work);
    };
    return issue(plan, std::move(buffers), call);
  });
}

C10dWork Backend::scatter(Tensors &outputs, TensorLists &inputs, const c10d::ScatterOptions &opts) {
  const Plan plan{OpType::SCATTER, "phalanx:scatter", "scatter", opts.timeout, opts.asyncOp};
  return checked(plan, outputs, inputs, [&] {
    const at::Tensor &output = only(outputs, plan.what());
    const int from = root(opts.rootRank, plan.what());
    const Recording recording = record(plan, inputs.empty() ? outputs : inputs[0], outputs, from);
    Buffers buffers;
    buffers.outputs = outputs;
    const List out = alone(output, writable(output, buffers));
    List in;
    if (const Tensors *list = list_of_root(inputs, output, {"input", "output"}, from, plan.what())) {
      in = readable(*list, read_, buffers);
      copy_overlapping(in, out, rank_, buffers);
    }
    const auto call = [&](auto *group, auto *options, auto **work) {
      const phx_block &to = out.blocks[0];
      if (!output.is_cuda())
        return core().scatter_blocks(group, in.blocks.data(), to.data, to.count, out.dtype, from, options, work);
      return core().scatter(group, in.start(), to.data, to.count, out.dtype, from, options, work);
    };
    return issue(plan, std::move(buffers), call);
  });
}

C10dWork Backend::reduce_scatter(Tensors &outputs, TensorLists &inputs, const c10d::ReduceScatterOptions &opts) {
  const Plan plan{OpType::REDUCE_SCATTER, "phalanx:reduce_scatter", "reduce_scatter", opts.timeout, opts.asyncOp};
  return checked(plan, outputs, inputs, [&] {
    const at::Tensor &output = only(outputs, plan.what());
    const Tensors &list = list_of_all(inputs, output, {"input", "output"}, plan.what());
    const Reduction reduction = reduction_of(opts.reduceOp, plan.what());
    const int32_t dtype = reduced_elements(output, plan.what()).dtype;
    const Recording recording = record(plan, list, outputs);
    Buffers buffers;
    buffers.outputs = outputs;
    const List out = alone(output, writable(output, buffers));
    List in = readable(list, read_, buffers);
    copy_overlapping(in, out, rank_, buffers);
    const auto call = [&](auto *group, auto *options, auto **work) {
      void *const to = out.start();
      const int32_t op = reduction.op;
      if (!in.flat) return core().reduce_scatter_blocks(group, in.blocks.data(), to, dtype, op, options, work);
      if (in.even()) return core().reduce_scatter(group, in.start(), to, out.blocks[0].count, dtype, op, options, work);
      return core().reduce_scatter_v(group, in.start(), to, in.counts().data(), dtype, op, options, work);
    };
    return issue(plan, std::move(buffers), call, reduction.scale);
  });
}

C10dWork Backend::between_tensors(const Plan &plan, Tensors outputs, at::TensorList inputs,
                                  const c10d::ReduceOp *reduce_op) {
  return checked(plan, outputs, inputs, [&] {
    const char *const what = plan.what();
    const bool gathers = reduce_op == nullptr;
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), what, ": ", outputs.size(), " outputs for ", inputs.size(),
                      " inputs; give one output for each input");
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_pair(outputs[i], inputs[i], what);
      const at::Tensor &whole = gathers ? outputs[i] : inputs[i], &block = gathers ? inputs[i] : outputs[i];
      const std::string_view its = gathers ? "output" : "input", other = gathers ? "input" : "output";
      TORCH_CHECK_VALUE(whole.numel() == size_ * block.numel(), what, ": ",
                        plan.is_single() ? c10::str("the ", its) : c10::str(its, " ", i), " has ", whole.numel(),
                        " elements and needs ", size_, " times the ", block.numel(), " of ",
                        plan.is_single() ? "the " : "its ", other);
    }
    const Reduction reduction = gathers ? Reduction{0, 1} : reduction_of(*reduce_op, what);
    const Recording recording = record(plan, inputs, outputs);
    Buffers buffers;
    buffers.staged = share_memory(outputs, [&](size_t i, size_t j) {  // the same pair twice
      return same_view(outputs[i], outputs[j]) && same_view(inputs[i], inputs[j]);
    });
    const int32_t kind = gathers ? PHX_CALL_ALL_GATHER : PHX_CALL_REDUCE_SCATTER;
    Calls calls;
    for (size_t i = 0; i < inputs.size(); ++i) {
      void *out = writable(outputs[i], buffers);
      const void *in = readable(inputs[i], buffers);
      const Elements elements = gathers ? elements_of(inputs[i]) : reduced_elements(outputs[i], what);
      calls.push_back(call_of(kind, in, out, elements, reduction.op));
    }
    for (size_t i = 0; i < calls.size(); ++i)
      for (size_t j = 0; j < calls.size(); ++j)
        calls[i].in = copy_if_overlapping(calls[i].in, inputs[i].nbytes(), calls[j].out, outputs[j].nbytes(), buffers);
    buffers.outputs = std::move(outputs);
    return issue_calls(plan, std::move(buffers), calls, reduction.scale);
  });
}

C10dWork Backend::_allgather_base(at::Tensor &output, at::Tensor &input, const c10d::AllgatherOptions &opts) {
  return between_tensors(
      {OpType::_ALLGATHER_BASE, "phalanx:all_gather_into_tensor", "_allgather_base", opts.timeout, opts.asyncOp},
      {output}, input, nullptr);
}

C10dWork Backend::allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                                  const c10d::AllgatherOptions &opts) {
  return between_tensors({OpType::COALESCED, "phalanx:all_gather_into_tensor_coalesced",
                          "allgather_into_tensor_coalesced", opts.timeout, opts.asyncOp},
                         outputs, inputs, nullptr);
}

C10dWork Backend::_reduce_scatter_base(at::Tensor &output, at::Tensor &input, const c10d::ReduceScatterOptions &opts) {
  return between_tensors({OpType::_REDUCE_SCATTER_BASE, "phalanx:reduce_scatter_tensor", "_reduce_scatter_base",
                          opts.timeout, opts.asyncOp},
                         {output}, input, &opts.reduceOp);
}

C10dWork Backend::reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                                  const c10d::ReduceScatterOptions &opts) {
  return between_tensors({scattered<OpType>(0), "phalanx:reduce_scatter_tensor_coalesced",
                          "reduce_scatter_tensor_coalesced", opts.timeout, opts.asyncOp},
                         outputs, inputs, &opts.reduceOp);
}

C10dWork Backend::issue_calls(const Plan &plan, Buffers &&buffers, Calls &calls, double scale) {
  TORCH_CHECK_VALUE(!calls.empty(), plan.what(), ": the list of tensors is empty; give at least one");
  const phx_call &first = calls[0];
  const auto call = [&](auto *group, auto *options, auto **work) {
    if (!plan.is_single()) return core().coalesced(group, calls.data(), calls.size(), options, work);
    if (first.kind == PHX_CALL_ALL_GATHER)
      return core().all_gather(group, first.in, first.out, first.count, first.dtype, options, work);
    return core().reduce_scatter(group, first.in, first.out, first.count, first.dtype, first.op, options, work);
  };
  return issue(plan, std::move(buffers), call, scale);
}

C10dWork Backend::alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &output_splits,
                                std::vector<int64_t> &input_splits, const c10d::AllToAllOptions &opts) {
  const bool even = input_splits.empty() && output_splits.empty();
  const Plan plan{OpType::ALLTOALL_BASE, "phalanx:all_to_all_single", even ? "all_to_all" : "all_to_allv", opts.timeout,
                  opts.asyncOp};
  return checked(plan, output, input, [&] {
    const char *const what = plan.what();
    check_pair(output, input, what);
    const auto counts = [&](const at::Tensor &tensor, std::vector<int64_t> splits, const char *side) {
      const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
      if (splits.empty()) {
        TORCH_CHECK_VALUE(rows % size_ == 0, what, ": dim 0 of the ", side, " has size ", rows,
                          ", which is not divisible by the group size ", size_, "; give split sizes");
        splits.assign(size_, rows / size_);
      }
      TORCH_CHECK_VALUE(splits.size() == static_cast<size_t>(size_), what, ": the split sizes of the ", side, " have ",
                        splits.size(), " entries; give ", size_, ", one for each rank");
      int64_t sum = 0;
      std::vector<size_t> made;
      for (const int64_t split : splits) {
        TORCH_CHECK_VALUE(split >= 0, what, ": the ", side, " has a split of size ", split, "; sizes are 0 or more");
        sum += split;
        made.push_back(elements_of(tensor, rows == 0 ? 0 : split * (tensor.numel() / rows)).count);
      }
      TORCH_CHECK_VALUE(sum == rows, what, ": the split sizes of the ", side, " add up to ", sum,
                        ", and its dim 0 has size ", rows, "; the two must be equal");
      return made;
    };
    const std::vector<size_t> out_counts = counts(output, output_splits, "output");
    const std::vector<size_t> in_counts = counts(input, input_splits, "input");
    const Recording recording = record(plan, input, output, -1, input_splits, output_splits);
    Buffers buffers;
    buffers.outputs = {output};
    void *out = writable(output, buffers);
    const void *in = copy_if_overlapping(readable(input, buffers), input.nbytes(), out, output.nbytes(), buffers);
    const auto call = [&, dtype = elements_of(input).dtype](auto *group, auto *options, auto **work) {
      return core().all_to_all_v(group, in, in_counts.data(), out, out_counts.data(), dtype, options, work);
    };
    return issue(plan, std::move(buffers), call);
  });
}

C10dWork Backend::alltoall(Tensors &outputs, Tensors &inputs, const c10d::AllToAllOptions &opts) {
  const Plan plan{OpType::ALLTOALL, "phalanx:all_to_all", "all_to_all", opts.timeout, opts.asyncOp};
  return checked(plan, outputs, inputs, [&] {
    check_list(outputs, outputs, plan.what());
    check_list(inputs, outputs, plan.what());
    const Recording recording = record(plan, inputs, outputs);
    Buffers buffers;
    buffers.outputs = outputs;
    const List out = writable(outputs, written_, buffers);
    List in = readable(inputs, read_, buffers);
    copy_overlapping(in, out, -1, buffers);
    const auto call = [&](auto *group, auto *options, auto **work) {
      if (in.flat)
        return core().all_to_all_v(group, in.start(), in.counts().data(), out.start(), out.counts().data(), out.dtype,
                                   options, work);
      return core().all_to_all_blocks(group, in.blocks.data(), out.blocks.data(), out.dtype, options, work);
    };
    return issue(plan, std::move(buffers), call);
  });
}

// Gathers the indices and values of each rank and adds them up. It is complete on return.
C10dWork Backend::allreduce_sparse(Tensors &tensors, const c10d::AllreduceOptions &opts) {
  TORCH_CHECK_VALUE(tensors.size() == 1 && tensors[0].is_sparse() && tensors[0].is_cpu(),
                    "all_reduce: a sparse tensor must be the only one of the call, in COO layout and on the CPU");
  TORCH_CHECK_VALUE(static_cast<c10d::ReduceOp::RedOpType>(opts.reduceOp) == c10d::ReduceOp::SUM,
                    "all_reduce: the only ReduceOp for sparse tensors is SUM");
  const at::NoGradGuard no_grad;
  const at::Tensor mine = tensors[0].coalesce();
  c10d::AllgatherOptions gather;
  gather.timeout = opts.timeout;
  gather.asyncOp = false;
  at::Tensor count = at::tensor({mine._nnz()}, at::kLong);
  at::Tensor counts = at::empty({size_}, at::kLong);
  _allgather_base(counts, count, gather);
  const auto gathered = [&](const at::Tensor &block) {  // dim 0 has size nnz
    TensorLists outputs(1);
    for (int rank = 0; rank < size_; ++rank) {
      std::vector<int64_t> sizes = block.sizes().vec();
      sizes[0] = counts[rank].item<int64_t>();
      outputs[0].push_back(at::empty(sizes, block.options()));
    }
    Tensors inputs{block};
    allgather(outputs, inputs, gather);
    return at::cat(outputs[0]);
  };
  const at::Tensor indices = gathered(mine.indices().t().contiguous()).t(), values = gathered(mine.values());
  tensors[0].copy_(at::sparse_coo_tensor(indices, values, mine.sizes()).coalesce());
  Buffers buffers;
  buffers.outputs = tensors;
  auto work = c10::make_intrusive<Work>(engine_, OpType::_ALLREDUCE_SPARSE, "phalanx:all_reduce", std::move(buffers),
                                        sequence_.load(), limit(opts.timeout));
  work->completed();
  return work;
}

}  // namespace phalanx
