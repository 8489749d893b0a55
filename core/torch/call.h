// One call of an op: who serves it, the checks that all ops share, and how a collective is started.
#pragma once

#include <utility>

#include "gpu.h"
#include "interned.h"
#include "pending.h"
#include "phalanx/tuning.h"

namespace phxt {

// The op and the group, for messages and for the call.
struct Call {
  const char *op;
  GroupRef group;                                 // empty: the call belongs to torch.distributed
  int32_t gpu = kHost;                            // where its tensors lie
  phx_gpu_options on_gpu = PHX_GPU_OPTIONS_INIT;  // set where that is a GPU
  mutable phx_options all_options = PHX_OPTIONS_INIT;

  // `work`: where the handle goes, NULL if the call is complete on return, or leaves its input as it is. Valid while
  // this object stays where it is.
  const phx_options *options(phx_work **work) const {
    if (gpu == kHost && work == nullptr) return nullptr;
    if (gpu == kHost)
      all_options.flags = PHX_OPTION_BUFFERED;
    else
      all_options.gpu = &on_gpu;
    return &all_options;
  }
  phx_group *handle() const { return group->handle; }
  explicit operator bool() const { return group != nullptr; }
  // With the text "<op> on group 'g' (rank r of n): <text>".
  [[noreturn]] void fail(phx_status status, const std::string &text) const;
  [[noreturn]] void refuse(const std::string &text) const;  // ValueError; nothing was sent
  [[noreturn]] void unsupported(const std::string &text) const;
};

// Ours when the group is registered in this thread's context, and serves the device of the tensor.
Call route(const char *op, const Tensor &input, const String &group_name);
Call route(const char *op, const TensorList &inputs, const String &group_name);  // that of all of them

bool serves(const Group &group, int32_t gpu);  // or kHost
void place(Call &call, int32_t gpu);  // likewise: where the tensors lie. It is not ours where they are not served.

// Calls phalanx_c10d::<op> with the arguments on the stack, which it consumes; the result takes their place.
void call_fallback(const char *op, const std::string &group_name, StableIValue *stack);
uint64_t fallback_count();

inline StableIValue release(int64_t value) { return static_cast<StableIValue>(value); }
inline StableIValue release(const String &text) { return static_cast<StableIValue>(intern(text.view())); }
inline StableIValue release(Tensor &tensor) { return tensor.release(); }
inline StableIValue release(IntList &list) { return list.release(); }
inline StableIValue release(TensorList &list) { return list.release(); }
// All arguments of the op, in order, back onto its stack, texts as numbers, and on to torch.distributed.
template <class... Arguments>
void fallback(const Call &call, const String &group_name, StableIValue *stack, Arguments &&...arguments) {
  const std::string name(group_name.view());
  size_t next = 0;
  ((stack[next++] = release(arguments)), ...);
  call_fallback(call.op, name, stack);
}

// The number of a reduction. An unknown name is a ValueError whoever serves the call (`parse_reduction`); what the core
// cannot do with a dtype is an error only where the core serves it.
int32_t parse_reduction(const char *op, std::string_view name);
void check_reduction(const Call &call, int32_t reduction, const ElementType &type);
void check_group_size(const Call &call, int64_t group_size);

// Whether collectives of this thread are complete on return, while one of these is alive: blocking_* and
// phalanx_ordered.
inline thread_local bool complete_on_return = false;
class CompletionScope {
 public:
  explicit CompletionScope(bool complete) : before_(std::exchange(complete_on_return, complete)) {}
  CompletionScope(const CompletionScope &) = delete;
  CompletionScope &operator=(const CompletionScope &) = delete;
  ~CompletionScope() { complete_on_return = before_; }

 private:
  const bool before_;
};

// On a GPU: the collective was put on the stream, or what follows it there. Those that are complete on return leave no
// mark, as ops of torch do not.
inline void mark_output(const Call &call, const Tensor &tensor, const Range &output) {
  if (!complete_on_return) gpu::leave_mark(call.group.get(), call.on_gpu, {{storage_base(tensor), output}});
}

// Runs `issue(phx_work **work)`, one collective of the core with call.options(work) that reads the input and writes
// `output`, which belongs to `tensor`. It is left pending where the core has taken all of its input when the start
// returns, so that the caller may change the input; where the input is large, or is read where it lies, it is complete
// on return. So it is where nothing comes out: what has no memory is not found again by who waits for it, and the peers
// need this rank to go on. On a GPU it is on the stream, and leaves a mark for others.
template <class Issue>
void run(const Call &call, const Tensor &tensor, const Range &output, const void *input, size_t input_bytes,
         Issue issue) {
  const Group &group = *call.group;
  if (call.gpu != kHost) {
    check_core(issue(nullptr));
    return mark_output(call, tensor, output);
  }
  if (complete_on_return || input_bytes == 0 || output.begin == output.end || input_bytes > group.eager_bytes ||
      group.size == 1 || phx_symm_covers(group.handle, input, input_bytes) != 0)
    return check_core(issue(nullptr));
  auto entry = std::make_shared<Pending>();
  entry->storage = storage_base(tensor);
  entry->output = output;
  entry->group = call.group;
  entry->tensor = tensor.share();
  check_core(issue(&entry->work));
  pending_add(std::move(entry));
}

// The ops, as torch calls them: registered in library.cpp.
using Kernel = void(StableIValue *stack, uint64_t inputs, uint64_t outputs);
Kernel all_reduce, all_reduce_, reduce_scatter_tensor, reduce_scatter_tensor_out, reduce_scatter_v;
Kernel all_gather_into_tensor, all_gather_into_tensor_out, all_gather_v;
Kernel all_to_all_single, shard_dim_alltoall, broadcast, broadcast_, wait_tensor, wait_tensor_;
Kernel all_reduce_coalesced, all_reduce_coalesced_, all_gather_into_tensor_coalesced, reduce_scatter_tensor_coalesced;
Kernel symm_arena, arena_view, arena_release_;
Kernel mm_into_, bmm_into_, addmm_into_;
Kernel mm_reduce_scatter, all_gather_mms;

}  // namespace phxt
