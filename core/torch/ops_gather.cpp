// all_gather_into_tensor, also into memory of the caller, and all_gather_v.
#include "output.h"
#include "parts.h"
#include "rows.h"

namespace phxt {
namespace {

phx_status all_gather(const Call &call, const Operand &in, const Operand &out, phx_work **work) {
  return phx_all_gather(call.handle(), in.data, out.data, in.count(), in.type.code, call.options(work), work);
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
  String group_name(stack[3]);
  const auto dim = static_cast<int64_t>(stack[2]);
  const Call call = route("all_gather_v", input, group_name);
  if (!call) return fallback(call, group_name, stack, input, list, dim, group_name);
  const Operand in = read_operand(input, call.gpu);
  const Parts parts(call, in, dim, list.values());
  parts.check_own(call, in.sizes[dim], "dim " + std::to_string(dim) + " of the input");
  Tensor result = empty(parts.shape(in, parts.sum()), in.dtype, call.gpu);
  const Operand out = fresh_output(result, in, parts.numel(parts.sum()));
  const auto side_by_side = [&](const Operand &to, phx_work **work) {
    if (parts.are_even()) return all_gather(call, in, to, work);
    return phx_all_gather_v(call.handle(), in.data, to.data, parts.counts().data(), in.type.code, call.options(work),
                            work);
  };
  if (parts.one_after_another()) {
    run(call, result, out.range(), in.data, in.bytes(), [&](phx_work **work) { return side_by_side(out, work); });
  } else if (parts.are_blocks(call.gpu)) {
    run(call, result, out.range(), in.data, in.bytes(), [&](phx_work **work) {
      return phx_all_gather_blocks(call.handle(), in.data, parts.blocks(out.data).data(), in.type.code,
                                   call.options(work), work);
    });
  } else {
    const Tensor made = empty(&out.numel, 1, in.dtype, call.gpu);
    const Operand flat = fresh_output(made, in, out.numel);
    check_core(side_by_side(flat, nullptr));
    parts.place(flat, out);
    if (call.gpu != kHost) mark_output(call, result, kEverything);
  }
  stack[0] = result.release();
}

}  // namespace phxt
