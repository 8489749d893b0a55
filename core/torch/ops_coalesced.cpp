// The coalesced ops: several tensors in one call of the core.
#include <algorithm>
#include <numeric>

#include "output.h"
#include "phalanx/tuning.h"
#include "rows.h"

namespace phxt {
namespace {

// One call of the core that is being put together. Its tensors stay where they are until it is run.
class Batch {
 public:
  Batch(const Call &call, size_t size) : call_(call) {
    calls_.reserve(size);
    outputs_.reserve(size);
  }

  // `out` belongs to `tensor`. `count` as in the core's function of that kind.
  void add(int32_t kind, const Operand &in, const Tensor &tensor, const Operand &out, size_t count, int32_t reduction) {
    phx_call made{};
    made.struct_size = sizeof made;
    made.kind = kind;
    made.in = in.data;
    made.out = out.data;
    made.count = count;
    made.dtype = in.type.code;
    made.op = reduction;
    calls_.push_back(made);
    outputs_.push_back({&tensor, out.range(), out.copy ? &out.copy : nullptr});
    largest_ = in.bytes() > largest_ ? in.bytes() : largest_;
    lies_there_ = lies_there_ || (call_.gpu == kHost && phx_symm_covers(call_.handle(), in.data, in.bytes()) != 0);
    copies_back_ = copies_back_ || out.copy;
  }

  // As `run`: it is left pending where the core has taken all input when the start returns, and none could be read
  // where it lies.
  void run() {
    if (calls_.empty()) return;
    const Group &group = *call_.group;
    if (complete_on_return || largest_ == 0 || largest_ > group.eager_bytes || group.size == 1 || copies_back_ ||
        lies_there_ || call_.gpu != kHost) {
      check_core(phx_coalesced(call_.handle(), calls_.data(), calls_.size(), call_.options(nullptr), nullptr));
      for (const Output &output : outputs_)
        if (output.copy) copy_into(*output.tensor, *output.copy);
      if (call_.gpu != kHost) mark_outputs();
      return;
    }
    std::vector<std::shared_ptr<Pending>> entries;
    for (const Output &output : outputs_) {
      auto entry = std::make_shared<Pending>();
      entry->storage = storage_base(*output.tensor);
      entry->output = output.range;
      entry->group = call_.group;
      entry->tensor = output.tensor->share();
      entries.push_back(std::move(entry));
    }
    phx_work *work = nullptr;
    check_core(phx_coalesced(call_.handle(), calls_.data(), calls_.size(), call_.options(&work), &work));
    for (auto &entry : entries) {
      entry->work = phx_work_retain(work);
      pending_add(std::move(entry));
    }
    phx_work_release(work);
  }

 private:
  void mark_outputs() const {
    if (complete_on_return) return;
    std::vector<gpu::Output> written;
    written.reserve(outputs_.size());
    for (const Output &output : outputs_)
      written.push_back({storage_base(*output.tensor), output.copy ? kEverything : output.range});
    gpu::leave_mark(call_.group.get(), call_.on_gpu, written);
  }

  struct Output {
    const Tensor *tensor;
    Range range;
    const Tensor *copy;  // NULL: written in place
  };
  const Call &call_;
  std::vector<phx_call> calls_;
  std::vector<Output> outputs_;
  size_t largest_ = 0;
  bool copies_back_ = false;
  bool lies_there_ = false;  // an input, in symmetric memory
};

// The operands of all inputs: they must outlive the batch.
std::vector<Operand> read_all(const Call &call, const TensorList &inputs) {
  std::vector<Operand> operands;
  operands.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) operands.push_back(read_operand(inputs[i], call.gpu));
  return operands;
}

// Tensors that share memory are reduced in copies, as the core wants it. Each element has one sum, through whichever of
// them it is written; but for those of different dtypes, which are refused.
void separate(const Call &call, const TensorList &inputs, std::vector<Operand> *operands) {
  std::vector<size_t> order(operands->size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto range = [&](size_t i) { return (*operands)[i].range(); };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return range(a).begin < range(b).begin; });
  std::vector<size_t> shared;
  const Operand *furthest = nullptr;
  size_t owner = 0;
  for (const size_t i : order) {
    const Operand &operand = (*operands)[i];
    if (operand.numel == 0) continue;
    if (furthest != nullptr && furthest->range().end > range(i).begin) {
      if (operand.dtype != furthest->dtype) raise(PHX_ERR_INVALID, std::string(call.op) + ": " + kSharedOutputs);
      shared.push_back(owner);
      shared.push_back(i);
    }
    if (furthest == nullptr || range(i).end > furthest->range().end) {
      furthest = &operand;
      owner = i;
    }
  }
  for (const size_t i : shared)
    if (!(*operands)[i].copy) make_private((*operands)[i], inputs[i]);
}

std::vector<Tensor> reserved(size_t size) {
  std::vector<Tensor> tensors;
  tensors.reserve(size);  // a batch points to its tensors
  return tensors;
}

}  // namespace

void all_reduce_coalesced(StableIValue *stack, uint64_t, uint64_t) {
  TensorList inputs(stack[0]);
  String reduce_op(stack[1]), group_name(stack[2]);
  const int32_t reduction = parse_reduction("all_reduce_coalesced", reduce_op.view());
  const Call call = route("all_reduce_coalesced", inputs, group_name);
  if (!call) return fallback(call, group_name, stack, inputs, reduce_op, group_name);
  const std::vector<Operand> ins = read_all(call, inputs);
  std::vector<Tensor> results = reserved(ins.size());
  Batch batch(call, ins.size());
  for (const Operand &in : ins) {
    check_reduction(call, reduction, in.type);
    results.push_back(empty(in.sizes, in.dims, in.dtype, call.gpu));
    batch.add(PHX_CALL_ALL_REDUCE, in, results.back(), fresh_output(results.back(), in, in.numel), in.count(),
              reduction);
  }
  batch.run();
  stack[0] = TensorList(std::move(results)).release();
}

void all_reduce_coalesced_(StableIValue *stack, uint64_t, uint64_t) {
  TensorList inputs(stack[0]);
  String reduce_op(stack[1]), group_name(stack[2]);
  const int32_t reduction = parse_reduction("all_reduce_coalesced_", reduce_op.view());
  const Call call = route("all_reduce_coalesced_", inputs, group_name);
  if (!call) return fallback(call, group_name, stack, inputs, reduce_op, group_name);
  std::vector<Operand> selves;
  selves.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    selves.push_back(write_operand(inputs[i], call.gpu));
    check_reduction(call, reduction, selves.back().type);
  }
  separate(call, inputs, &selves);
  Batch batch(call, selves.size());
  for (size_t i = 0; i < selves.size(); ++i)
    batch.add(PHX_CALL_ALL_REDUCE, selves[i], inputs[i], selves[i], selves[i].count(), reduction);
  batch.run();
}

void all_gather_into_tensor_coalesced(StableIValue *stack, uint64_t, uint64_t) {
  TensorList inputs(stack[0]);
  String group_name(stack[2]);
  const auto group_size = static_cast<int64_t>(stack[1]);
  const Call call = route("all_gather_into_tensor_coalesced", inputs, group_name);
  if (!call) return fallback(call, group_name, stack, inputs, group_size, group_name);
  check_group_size(call, group_size);
  const std::vector<Operand> ins = read_all(call, inputs);
  std::vector<Tensor> results = reserved(ins.size());
  Batch batch(call, ins.size());
  for (const Operand &in : ins) {
    results.push_back(empty(with_dim0(in, group_size * rows_of(in)), in.dtype, call.gpu));
    const Operand out = fresh_output(results.back(), in, in.numel * group_size);
    batch.add(PHX_CALL_ALL_GATHER, in, results.back(), out, in.count(), 0);
  }
  batch.run();
  stack[0] = TensorList(std::move(results)).release();
}

void reduce_scatter_tensor_coalesced(StableIValue *stack, uint64_t, uint64_t) {
  TensorList inputs(stack[0]);
  String reduce_op(stack[1]), group_name(stack[3]);
  const auto group_size = static_cast<int64_t>(stack[2]);
  const int32_t reduction = parse_reduction("reduce_scatter_tensor_coalesced", reduce_op.view());
  const Call call = route("reduce_scatter_tensor_coalesced", inputs, group_name);
  if (!call) return fallback(call, group_name, stack, inputs, reduce_op, group_size, group_name);
  check_group_size(call, group_size);
  const std::vector<Operand> ins = read_all(call, inputs);
  std::vector<Tensor> results = reserved(ins.size());
  Batch batch(call, ins.size());
  for (const Operand &in : ins) {
    check_reduction(call, reduction, in.type);
    results.push_back(empty(with_dim0(in, rows_per_rank(call, in)), in.dtype, call.gpu));
    const Operand out = fresh_output(results.back(), in, in.numel / group_size);
    batch.add(PHX_CALL_REDUCE_SCATTER, in, results.back(), out, out.count(), reduction);
  }
  batch.run();
  stack[0] = TensorList(std::move(results)).release();
}

}  // namespace phxt
