// broadcast, in place and not, all_to_all_single, and shard_dim_alltoall.
#include <cstring>

#include "output.h"
#include "parts.h"
#include "rows.h"

namespace phxt {
namespace {

int32_t check_source(const Call &call, int64_t source) {
  if (source < 0 || source >= call.group->size)
    call.refuse("src is " + std::to_string(source) + ", but must be a rank within the group: 0 to " +
                std::to_string(call.group->size - 1));
  return static_cast<int32_t>(source);
}

phx_status broadcast_from(const Call &call, const Operand &buffer, int32_t root, phx_work **work) {
  return phx_broadcast(call.handle(), buffer.data, buffer.count(), buffer.type.code, root, call.options(work), work);
}

// Only the root knows where its input lies, so `run` asks on every rank whether there is any memory that it may lie in:
// all wait inside the call, or none does.
constexpr const void *kAnywhere = nullptr;

}  // namespace

void broadcast(StableIValue *stack, uint64_t, uint64_t) {
  Tensor input(stack[0]);
  String group_name(stack[2]);
  const auto source = static_cast<int64_t>(stack[1]);
  const Call call = route("broadcast", input, group_name);
  if (!call) return fallback(call, group_name, stack, input, source, group_name);
  const int32_t root = check_source(call, source);
  const Operand in = read_operand(input, call.gpu);
  Tensor result = empty(in.sizes, in.dims, in.dtype, call.gpu);
  const Operand out = fresh_output(result, in, in.numel);
  const bool gives = root == call.group->rank;
  if (gives && call.gpu != kHost)
    copy_into(result, in.copy ? in.copy : input);
  else if (gives && in.bytes() != 0)
    std::memcpy(out.data, in.data, in.bytes());
  // The root's buffer is only read: it may be the input itself, which peers can perhaps read where it lies.
  run(call, result, out.range(), kAnywhere, in.bytes(),
      [&](phx_work **work) { return broadcast_from(call, gives ? in : out, root, work); });
  stack[0] = result.release();
}

void broadcast_(StableIValue *stack, uint64_t, uint64_t) {
  Tensor input(stack[0]);
  String group_name(stack[2]);
  const auto source = static_cast<int64_t>(stack[1]);
  const Call call = route("broadcast_", input, group_name);
  if (!call) return fallback(call, group_name, stack, input, source, group_name);
  const int32_t root = check_source(call, source);
  const Operand self = write_operand(input, call.gpu);
  run_into(call, input, self, kAnywhere, self.bytes(),
           [&](phx_work **work) { return broadcast_from(call, self, root, work); });
}

void all_to_all_single(StableIValue *stack, uint64_t, uint64_t) {
  Tensor input(stack[0]);
  IntList output_list(stack[1]), input_list(stack[2]);
  String group_name(stack[3]);
  const Call call = route("all_to_all_single", input, group_name);
  if (!call) return fallback(call, group_name, stack, input, output_list, input_list, group_name);
  const Operand in = read_operand(input, call.gpu);
  if (in.dims == 0) call.refuse("the input has no dims, so it cannot be split; give a tensor of at least one dim");
  const bool even = output_list.empty() && input_list.empty();
  const std::vector<int64_t> input_rows = check_splits(call, "input_split_sizes", input_list.values(), in.sizes[0]);
  const std::vector<int64_t> output_rows = check_splits(call, "output_split_sizes", output_list.values(), in.sizes[0]);
  check_sum(call, "input_split_sizes", sum_of(input_rows), in.sizes[0], 0);
  const int64_t rows = sum_of(output_rows);
  Tensor result = empty(with_dim0(in, rows), in.dtype, call.gpu);
  const Operand out = fresh_output(result, in, rows * in.numel_of_row());
  // Which of the two calls it is depends on whether splits were given, not on their values, so that all ranks agree.
  if (even)
    run(call, result, out.range(), in.data, in.bytes(), [&](phx_work **work) {
      return phx_all_to_all(call.handle(), in.data, out.data, in.count() / static_cast<size_t>(call.group->size),
                            in.type.code, call.options(work), work);
    });
  else {
    const std::vector<size_t> in_counts = in_elements(input_rows, in), out_counts = in_elements(output_rows, in);
    run(call, result, out.range(), in.data, in.bytes(), [&](phx_work **work) {
      return phx_all_to_all_v(call.handle(), in.data, in_counts.data(), out.data, out_counts.data(), in.type.code,
                              call.options(work), work);
    });
  }
  stack[0] = result.release();
}

void shard_dim_alltoall(StableIValue *stack, uint64_t, uint64_t) {
  Tensor input(stack[0]);
  IntList gather_list(stack[1]), shard_list(stack[2]);
  String group_name(stack[6]);
  const auto own = static_cast<int64_t>(stack[3]), gather_dim = static_cast<int64_t>(stack[4]),
             shard_dim = static_cast<int64_t>(stack[5]);
  const Call call = route("shard_dim_alltoall", input, group_name);
  if (!call)
    return fallback(call, group_name, stack, input, gather_list, shard_list, own, gather_dim, shard_dim, group_name);
  const Operand in = read_operand(input, call.gpu);
  if (gather_dim == shard_dim)
    call.refuse("gather_dim and shard_dim are both " + std::to_string(shard_dim) + "; give two dims");
  const Parts sent(call, in, shard_dim, shard_list.values(), "shard_sizes");
  check_sum(call, "shard_sizes", sent.sum(), in.sizes[shard_dim], shard_dim);
  sent.check_own(call, own, "own");
  const std::vector<int64_t> part = sent.shape(in, own);  // of this rank's input, which goes to itself
  Operand like;
  like.type = in.type;
  like.dims = in.dims;
  like.sizes = part.data();
  const Parts received(call, like, gather_dim, gather_list.values(), "gather_sizes");
  received.check_own(call, in.sizes[gather_dim], "dim " + std::to_string(gather_dim) + " of the input");
  Tensor result = empty(received.shape(like, received.sum()), in.dtype, call.gpu);
  const Operand out = fresh_output(result, in, received.numel(received.sum()));

  const bool packs = !sent.are_blocks(call.gpu), unpacks = !received.are_blocks(call.gpu);
  Tensor packed, unpacked;
  Operand from, to;
  if (packs) {
    packed = empty(&in.numel, 1, in.dtype, call.gpu);
    from = fresh_output(packed, in, in.numel);
    sent.collect(in, from);
  }
  if (unpacks) {
    unpacked = empty(&out.numel, 1, in.dtype, call.gpu);
    to = fresh_output(unpacked, in, out.numel);
  }
  const void *const source = packs ? from.data : in.data;
  void *const target = unpacks ? to.data : out.data;
  const bool is_flat = (packs || sent.one_after_another()) && (unpacks || received.one_after_another());
  const auto issue = [&](phx_work **work) {
    // Even parts have one shape on all ranks, so all ranks make the same call.
    if (is_flat && sent.are_even() && received.are_even())
      return phx_all_to_all(call.handle(), source, target, sent.counts()[0], in.type.code, call.options(work), work);
    if (is_flat)
      return phx_all_to_all_v(call.handle(), source, sent.counts().data(), target, received.counts().data(),
                              in.type.code, call.options(work), work);
    return phx_all_to_all_blocks(call.handle(), (packs ? sent.flat_blocks(source) : sent.blocks(source)).data(),
                                 (unpacks ? received.flat_blocks(target) : received.blocks(target)).data(),
                                 in.type.code, call.options(work), work);
  };
  if (unpacks) {
    check_core(issue(nullptr));
    received.place(to, out);
    if (call.gpu != kHost) mark_output(call, result, kEverything);
  } else {
    run(call, result, out.range(), source, in.bytes(), issue);
  }
  stack[0] = result.release();
}

}  // namespace phxt
