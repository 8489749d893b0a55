// Routing, shared checks, and the fallback to torch.distributed.
#include "call.h"

#include <strings.h>

#include <atomic>

#include "library.h"
#include "phalanx_torch.h"

namespace phxt {
namespace {

std::atomic<uint64_t> fallbacks{0};

std::string describe(const Call &call, const std::string &text) {
  return std::string(call.op) + " on group '" + call.group->name + "' (rank " + std::to_string(call.group->rank) +
         " of " + std::to_string(call.group->size) + "): " + text;
}

struct Reduction {
  const char *name;
  int32_t number;
};
constexpr Reduction kReductions[] = {{"sum", PHX_OP_SUM}, {"avg", PHX_OP_AVG},   {"product", PHX_OP_PROD},
                                     {"min", PHX_OP_MIN}, {"max", PHX_OP_MAX},   {"band", PHX_OP_BAND},
                                     {"bor", PHX_OP_BOR}, {"bxor", PHX_OP_BXOR}, {"premul_sum", PHX_OP_PREMUL_SUM}};

}  // namespace

void Call::fail(phx_status status, const std::string &text) const { raise(status, describe(*this, text)); }
void Call::refuse(const std::string &text) const { fail(PHX_ERR_INVALID, text); }
void Call::unsupported(const std::string &text) const { fail(PHX_ERR_UNSUPPORTED, text); }

bool serves(const Group &group, int32_t gpu) {
  if (gpu == kHost) return group.serves_cpu.load(std::memory_order_relaxed);
  return gpu != kElsewhere && group.serves_cuda.load(std::memory_order_relaxed);
}

// Tensors on a device that the group does not serve go to torch, as in a group "cpu:phalanx,cuda:nccl".
void place(Call &call, int32_t gpu) {
  if (!serves(*call.group, gpu)) return call.group.reset();
  if (__builtin_expect(gpu == kHost, 1)) return;
  call.gpu = gpu;
  call.on_gpu = gpu::options(gpu);
}

Call route(const char *op, const Tensor &input, const String &group_name) {
  Call call{op, find_group(group_name.view())};
  if (call.group) place(call, gpu_of(input));
  return call;
}

Call route(const char *op, const TensorList &inputs, const String &group_name) {
  Call call{op, find_group(group_name.view())};
  if (!call.group || inputs.size() == 0) return call;
  const int32_t first = gpu_of(inputs[0]);
  bool all_served = true;
  int32_t other = first;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const int32_t gpu = gpu_of(inputs[i]);
    all_served = all_served && serves(*call.group, gpu);
    if (gpu != first) other = gpu;
  }
  if (!all_served)
    call.group.reset();
  else if (other != first)
    call.refuse("the inputs are on " + device_name(first) + " and on " + device_name(other) +
                "; all inputs of one call must be on one device");
  else
    place(call, first);
  return call;
}

void call_fallback(const char *op, const std::string &group_name, StableIValue *stack) {
  fallbacks.fetch_add(1, std::memory_order_relaxed);
  const std::string name = std::string("phalanx_c10d::") + op;
  if (torch_call_dispatcher(name.c_str(), "", stack, kTorchVersion) == 0) return;
  std::string reason = torch_reason();
  if (reason.find("Could not run '" + name) != std::string::npos)  // torch goes on to list all its dispatch keys
    reason = "no implementation of " + name + " for this device; import phalanx.collectives, which has one";
  const std::string context = current_context() == 0 ? "" : " of context " + std::to_string(current_context());
  raise(PHX_ERR_UNSUPPORTED, std::string(op) + " on group '" + group_name + "'" + context + ": " + reason);
}

uint64_t fallback_count() { return fallbacks.load(std::memory_order_relaxed); }

int32_t parse_reduction(const char *op, std::string_view text) {
  for (const Reduction &reduction : kReductions)
    if (std::string_view(reduction.name).size() == text.size() &&
        strncasecmp(reduction.name, text.data(), text.size()) == 0)
      return reduction.number;
  raise(PHX_ERR_INVALID, std::string(op) + ": unknown reduce op '" + std::string(text) +
                             "'; expected sum, avg, product, min, max, band, bor or bxor");
}

void check_reduction(const Call &call, int32_t reduction, const ElementType &type) {
  if (__builtin_expect(reduction == PHX_OP_PREMUL_SUM, 0))
    call.refuse("premul_sum needs a factor, for which this op has no argument; multiply the input by it and use sum");
  if (__builtin_expect(type.reduce == Reducible::always, 1)) return;
  if (type.reduce == Reducible::sums && (reduction == PHX_OP_SUM || reduction == PHX_OP_AVG)) return;
  if (type.reduce == Reducible::sums)
    call.unsupported(std::string("only sum and avg are defined for ") + type.name +
                     "; reduce torch.view_as_real(input) instead");
  call.unsupported(std::string("a tensor ") + type.name +
                   " can be moved but not reduced; convert it to float32 or bfloat16 first");
}

void check_group_size(const Call &call, int64_t group_size) {
  if (__builtin_expect(group_size != call.group->size, 0))
    call.refuse("group_size is " + std::to_string(group_size) + ", but the group has " +
                std::to_string(call.group->size) + " ranks");
}

}  // namespace phxt

extern "C" uint64_t phxt_fallback_count(void) { return phxt::fallback_count(); }
