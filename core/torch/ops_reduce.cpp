// all_reduce and reduce_scatter_tensor, each also into memory of the caller, and reduce_scatter_v.
#include "host_memory.h"
#include "output.h"
#include "parts.h"
#include "phalanx_torch.h"
#include "rows.h"

namespace phxt {
namespace {

phx_status reduce_scatter(const Call &call, const Operand &in, const Operand &out, int32_t reduction, phx_work **work) {
  return phx_reduce_scatter(call.handle(), in.data, out.data, out.count(), in.type.code, reduction, call.options(work),
                            work);
}

}  // namespace

void all_reduce(StableIValue *stack, uint64_t, uint64_t) {
  Tensor input(stack[0]);
  String reduce_op(stack[1]), group_name(stack[2]);
  const int32_t reduction = parse_reduction("all_reduce", reduce_op.view());
  const Call call = route("all_reduce", input, group_name);
  if (!call) return fallback(call, group_name, stack, input, reduce_op, group_name);
  const Operand in = read_operand(input, call.gpu);
  check_reduction(call, reduction, in.type);
  Tensor result = empty(in.sizes, in.dims, in.dtype, call.gpu);
  const Operand out = fresh_output(result, in, in.numel);
  run(call, result, out.range(), in.data, in.bytes(), [&](phx_work **work) {
    return phx_all_reduce(call.handle(), in.data, out.data, in.count(), in.type.code, reduction, call.options(work),
                          work);
  });
  stack[0] = result.release();
}

void all_reduce_(StableIValue *stack, uint64_t, uint64_t) {
  Tensor input(stack[0]);
  String reduce_op(stack[1]), group_name(stack[2]);
  const int32_t reduction = parse_reduction("all_reduce_", reduce_op.view());
  const Call call = route("all_reduce_", input, group_name);
  if (!call) return fallback(call, group_name, stack, input, reduce_op, group_name);
  const Operand self = write_operand(input, call.gpu);
  check_reduction(call, reduction, self.type);
  run_into(call, input, self, self, [&](phx_work **work) {
    return phx_all_reduce(call.handle(), self.data, self.data, self.count(), self.type.code, reduction,
                          call.options(work), work);
  });
}

void reduce_scatter_tensor(StableIValue *stack, uint64_t, uint64_t) {
  Tensor input(stack[0]);
  String reduce_op(stack[1]), group_name(stack[3]);
  const auto group_size = static_cast<int64_t>(stack[2]);
  const int32_t reduction = parse_reduction("reduce_scatter_tensor", reduce_op.view());
  const Call call = route("reduce_scatter_tensor", input, group_name);
  if (!call) return fallback(call, group_name, stack, input, reduce_op, group_size, group_name);
  check_group_size(call, group_size);
  const Operand in = read_operand(input, call.gpu);
  check_reduction(call, reduction, in.type);
  Tensor result = empty(with_dim0(in, rows_per_rank(call, in)), in.dtype, call.gpu);
  const Operand out = fresh_output(result, in, in.numel / group_size);
  run(call, result, out.range(), in.data, in.bytes(),
      [&](phx_work **work) { return reduce_scatter(call, in, out, reduction, work); });
  stack[0] = result.release();
}

void reduce_scatter_tensor_out(StableIValue *stack, uint64_t, uint64_t) {
  Tensor input(stack[0]), target(stack[4]);
  String reduce_op(stack[1]), group_name(stack[3]);
  const auto group_size = static_cast<int64_t>(stack[2]);
  const int32_t reduction = parse_reduction("reduce_scatter_tensor", reduce_op.view());
  const Call call = route("reduce_scatter_tensor_out", input, group_name);
  if (!call) return fallback(call, group_name, stack, input, reduce_op, group_size, group_name, target);
  check_group_size(call, group_size);
  Operand in = read_operand(input, call.gpu);
  check_reduction(call, reduction, in.type);
  rows_per_rank(call, in);
  const Operand out = caller_output(call, target, in, in.numel / group_size);
  if (in.range().overlaps(out.range()) && !is_in_place(call, out, in)) make_private(in, input);
  run_into(call, target, out, in, [&](phx_work **work) { return reduce_scatter(call, in, out, reduction, work); });
}

void reduce_scatter_v(StableIValue *stack, uint64_t, uint64_t) {
  Tensor input(stack[0]);
  String reduce_op(stack[1]), group_name(stack[5]);
  IntList list(stack[2]);
  const auto own = static_cast<int64_t>(stack[3]), dim = static_cast<int64_t>(stack[4]);
  const int32_t reduction = parse_reduction("reduce_scatter_v", reduce_op.view());
  const Call call = route("reduce_scatter_v", input, group_name);
  if (!call) return fallback(call, group_name, stack, input, reduce_op, list, own, dim, group_name);
  const Operand in = read_operand(input, call.gpu);
  check_reduction(call, reduction, in.type);
  const Parts parts(call, in, dim, list.values());
  check_sum(call, "sizes", parts.sum(), in.sizes[dim], dim);
  parts.check_own(call, own, "own");
  Tensor result = empty(parts.shape(in, own), in.dtype, call.gpu);
  const Operand out = fresh_output(result, in, parts.numel(own));
  const auto side_by_side = [&](const Operand &from, phx_work **work) {
    if (parts.are_even()) return reduce_scatter(call, from, out, reduction, work);
    return phx_reduce_scatter_v(call.handle(), from.data, out.data, parts.counts().data(), in.type.code, reduction,
                                call.options(work), work);
  };
  if (parts.one_after_another()) {
    run(call, result, out.range(), in.data, in.bytes(), [&](phx_work **work) { return side_by_side(in, work); });
  } else if (parts.are_blocks(call.gpu)) {
    run(call, result, out.range(), in.data, in.bytes(), [&](phx_work **work) {
      return phx_reduce_scatter_blocks(call.handle(), parts.blocks(in.data).data(), out.data, in.type.code, reduction,
                                       call.options(work), work);
    });
  } else {
    const Tensor made = empty(&in.numel, 1, in.dtype, call.gpu);
    const Operand flat = fresh_output(made, in, in.numel);
    parts.collect(in, flat);
    check_core(side_by_side(flat, nullptr));
    if (call.gpu != kHost) mark_output(call, result, out.range());
  }
  stack[0] = result.release();
}

}  // namespace phxt

int32_t phxt_all_reduce(const void *in, void *out, int64_t numel, int32_t torch_dtype, const char *reduce_op,
                        size_t reduce_op_size, const char *group_name, size_t group_name_size) {
  using namespace phxt;
  int32_t done = 0;
  const phx_status status = quietly([&] {
    const Call call{"all_reduce", find_group({group_name, group_name_size})};
    if (!call || !serves(*call.group, kHost) || pending_count() != 0) return;
    const int32_t reduction = parse_reduction("all_reduce", {reduce_op, reduce_op_size});
    const ElementType type = element_type(torch_dtype);
    check_reduction(call, reduction, type);
    const size_t count = static_cast<size_t>(numel) * type.lanes;
    if (in != out) expect_first_touch(out, static_cast<size_t>(numel) * type.bytes);
    check_core(phx_all_reduce(call.handle(), in, out, count, type.code, reduction, nullptr, nullptr));
    done = 1;
  });
  return status == PHX_OK ? done : status;
}
