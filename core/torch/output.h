// Where a collective writes: a tensor made for it, or one of the caller's.
#pragma once

#include "call.h"

namespace phxt {

// A tensor that was just made to hold `numel` elements like those of `like`.
inline Operand fresh_output(const Tensor &made, const Operand &like, int64_t numel) {
  Operand result;
  result.data = mutable_data(made);
  result.type = like.type;
  result.dtype = like.dtype;
  result.gpu = like.gpu;
  result.numel = numel;
  return result;
}

// The caller's `out`, checked: dtype, device, number of elements.
Operand caller_output(const Call &call, const Tensor &out, const Operand &like, int64_t numel);

// Whether `part` is this rank's place in `whole`, as FSDP has it, which the core allows on a GPU. On the host the input
// of a start that is pending may not be written.
inline bool is_in_place(const Call &call, const Operand &part, const Operand &whole) {
  return call.gpu != kHost && part.range().begin == whole.range().begin + call.group->rank * part.bytes();
}

// Runs a collective that writes `out`, which belongs to `tensor`; where `out` is a contiguous copy of a tensor with
// strides, it completes at once and is copied back.
template <class Issue>
void run_into(const Call &call, const Tensor &tensor, const Operand &out, const void *input, size_t input_bytes,
              Issue issue) {
  if (!out.copy) return run(call, tensor, out.range(), input, input_bytes, issue);
  check_core(issue(nullptr));
  copy_into(tensor, out.copy);
  if (call.gpu != kHost) mark_output(call, tensor, kEverything);
}
template <class Issue>
void run_into(const Call &call, const Tensor &tensor, const Operand &out, const Operand &in, Issue issue) {
  run_into(call, tensor, out, in.data, in.bytes(), issue);
}

}  // namespace phxt
