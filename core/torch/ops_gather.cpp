// all_gather_into_tensor, also into memory of the caller, and all_gather_v.
#include "output.h"
#include "rows.h"

namespace phxt {
namespace {

phx_status all_gather(const Call &call, const Operand &in, const Operand &out, phx_work **work) {
  return phx_all_gather(call.handle(), in.data, out.data, in.count(), in.type.code, call.options(), work);
}

}  // namespace

void all_gather_into_tensor(StableIValue *stack, uint64_t, uint64_t) {
  Tensor input(stack[0]);
  String group_name(stack[2]);
  const auto group_size = static_cast<int64_t>(stack[1]);
  const Call call = route("all_gather_into_tensor", input, group_name);
  if (!call) return fallback(call, group_name, stack, input, group_size, group_name);
  check_group_size(call, group_size);
  const Operand in = read_operand(input, call.gpu);
  Tensor result = empty(with_dim0(in, group_size * rows_of(in)), in.dtype, call.gpu);
  const Operand out = fresh_output(result, in, in.numel * group_size);
  run(call, result, out.range(), in.data, in.bytes(), [&](phx_work **work) { return all_gather(call, in, out, work); });
  stack[0] = result.release();
}

void all_gather_into_tensor_out(StableIValue *stack, uint64_t, uint64_t) {
  Tensor input(stack[0]), target(stack[3]);
  String group_name(stack[2]);
  const auto group_size = static_cast<int64_t>(stack[1]);
  const Call call = route("all_gather_into_tensor_out", input, group_name);
  if (!call) return fallback(call, group_name, stack, input, group_size, group_name, target);
  check_group_size(call, group_size);
  Operand in = read_operand(input, call.gpu);
  const Operand out = caller_output(call, target, in, in.numel * group_size);
  if (in.range().overlaps(out.range()) && !is_in_place(call, in, out)) make_private(in, input);
  run_into(call, target, out, in, [&](phx_work **work) { return all_gather(call, in, out, work); });
}

void all_gather_v(StableIValue *stack, uint64_t, uint64_t) {
  Tensor input(stack[0]);
  IntList list(stack[1]);
  String group_name(stack[2]);
  const Call call = route("all_gather_v", input, group_name);
  if (!call) return fallback(call, group_name, stack, input, list, group_name);
  const Operand in = read_operand(input, call.gpu);
  if (in.dims == 0)
    call.refuse("the input has no dims, so it cannot be joined along one; give a tensor of at least one dim");
  const std::vector<int64_t> rows = check_sizes(call, list.values());
  check_own(call, rows, in.sizes[0], "dim 0 of the input");
  Tensor result = empty(with_dim0(in, sum_of(rows)), in.dtype, call.gpu);
  const Operand out = fresh_output(result, in, sum_of(rows) * in.numel_of_row());
  const std::vector<size_t> counts = in_elements(rows, in);
  run(call, result, out.range(), in.data, in.bytes(), [&](phx_work **work) {
    return phx_all_gather_v(call.handle(), in.data, out.data, counts.data(), in.type.code, call.options(), work);
  });
  stack[0] = result.release();
}

}  // namespace phxt
