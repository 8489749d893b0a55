#include "ops/enqueue.h"

#include "base/hash.h"
#include "gpu/gpu_group.h"
#include "symm/table.h"

namespace phx {
namespace {

bool is_floating(int32_t dtype) {
  return dtype == PHX_DTYPE_F16 || dtype == PHX_DTYPE_BF16 || dtype == PHX_DTYPE_F32 || dtype == PHX_DTYPE_F64 ||
         dtype == PHX_DTYPE_C64 || dtype == PHX_DTYPE_C128;
}
bool is_integer(int32_t dtype) { return dtype >= PHX_DTYPE_I8 && dtype <= PHX_DTYPE_U64; }

// The kernel with which switches reduce.
Reducer switch_reducer_of(int32_t dtype, int32_t op) {
  const bool wide =
      dtype == PHX_DTYPE_I32 || dtype == PHX_DTYPE_U32 || dtype == PHX_DTYPE_I64 || dtype == PHX_DTYPE_U64;
  const bool half = dtype == PHX_DTYPE_F16 || dtype == PHX_DTYPE_BF16;
  switch (op) {
    case PHX_OP_SUM:
      if (half || dtype == PHX_DTYPE_F32 || dtype == PHX_DTYPE_F64 || dtype == PHX_DTYPE_U32 || dtype == PHX_DTYPE_U64)
        return {dtype, op, 1};
      if (wide) return {dtype + 1, op, 1};
      if (dtype == PHX_DTYPE_C64) return {PHX_DTYPE_F32, op, 2};
      if (dtype == PHX_DTYPE_C128) return {PHX_DTYPE_F64, op, 2};
      break;
    case PHX_OP_MIN:
    case PHX_OP_MAX:
      if (half || wide) return {dtype, op, 1};
      break;
    case PHX_OP_BAND:
    case PHX_OP_BOR:
    case PHX_OP_BXOR:
      if (is_integer(dtype)) return {PHX_DTYPE_U8, op, phx_dtype_size(dtype)};
      break;
    default: break;
  }
  return {0, op, 1};
}

// Where in `symm` the `bytes` of results lie; empty if they lie elsewhere or the switches do not reach it.
cuda::Spread place_of(const Symm &symm, const void *out, size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(out), base = reinterpret_cast<uintptr_t>(symm.block().base);
  const size_t size = symm.block().size;
  if (gpu_symm_of(symm) == nullptr || gpu_symm_of(symm)->team().multicast == nullptr || at < base || at - base > size ||
      bytes > size - (at - base))
    return {};
  const uint64_t facts[2] = {symm.key(), at - base};
  return {gpu_symm_of(symm)->team(), at - base, hash_bytes(facts, sizeof facts) | 1};
}

// The same for all symmetric memory of the group.
cuda::Spread find_place(const Call &call, const Symm &symm, size_t bytes) {
  const void *const out = call.buffers().out;
  const cuda::Spread spread = place_of(symm, out, bytes);
  if (spread.place != 0) return spread;
  const BlockRef block = call.group().world().blocks().find(out);
  const std::shared_ptr<Symm> other = block ? symms_of(call.group()).find(block->serial) : nullptr;
  return other ? place_of(*other, out, bytes) : cuda::Spread{};
}

class Chooser {
 public:
  Chooser(Call &call, Symm &symm, size_t offset)
      : call_(call), symm_(symm), offset_(offset), wants_(call.options().algo == PHX_ALGO_MULTIMEM) {}

  MultimemWay choose() {
    if (!call_.ok() || !possible()) return {};
    switch (call_.kind()) {
      case Kind::kBroadcast:
        if (call_.symmetric()) return {"phx_gpu_multimem_broadcast", 1, in_place(), false};
        break;
      case Kind::kAllGather: return gather();
      case Kind::kAllReduce:
      case Kind::kReduceScatter:
      case Kind::kReduce: return wants_ ? reduce() : MultimemWay{};
      default: break;
    }
    if (wants_) refuse_multimem(call_);
    return {};
  }

 private:
  template <class... Parts>
  MultimemWay refuse(const char *format, Parts... parts) {
    if (wants_) call_.refuse(fail(PHX_ERR_UNSUPPORTED, call_.name(), format, parts...));
    return {};
  }
  cuda::Spread in_place() const { return {gpu_symm_of(symm_)->team(), offset_, 0}; }

  // Whether any collective on this block can use the switches.
  bool possible() {
    const cuda::GpuSymm &gpu = *gpu_symm_of(symm_);
    const std::string &why = gpu.no_multicast();
    if (!why.empty())
      refuse("multicast is not available in group '%s': %s", call_.group().name().c_str(), why.c_str());
    else if (!gpu.has_multimem())
      refuse(
          "not every rank of group '%s' has kernels for multicast; install a library (or set PHALANX_CUDA_KERNELS) "
          "that was built for sm_90 or later",
          call_.group().name().c_str());
    return why.empty() && gpu.has_multimem();
  }

  MultimemWay gather() {
    const Buffers &buffers = call_.buffers();
    const size_t bytes = buffers.count * buffers.item, all = bytes * static_cast<size_t>(call_.group_size());
    if (!wants_ && all < gpu_of(call_.group()).tuning().multicast_bytes) return {};
    if (bytes % sizeof(uint64_t[2]) != 0 || offset_ % sizeof(uint64_t[2]) != 0)
      return refuse("NVLink switches move pieces of 16 bytes, but size %zu and offset %zu are not both multiples of 16",
                    bytes, offset_);
    cuda::Spread spread = find_place(call_, symm_, all);
    if (spread.offset % sizeof(uint64_t[2]) != 0) spread = {};
    if (wants_ && spread.place == 0)
      return refuse(
          "out must be in symmetric memory of group '%s', at the same offset on all ranks and a multiple of 16 "
          "bytes",
          call_.group().name().c_str());
    if (wants_) call_.gives_at(spread.place);
    return {"phx_gpu_multimem_all_gather", 1, spread, false};
  }

  MultimemWay reduce() {
    const Buffers &buffers = call_.buffers();
    const int32_t dtype = call_.reduction().dtype, op = call_.reduction().op;
    const Reducer reducer = switch_reducer_of(dtype, op);
    const char *const op_name = phx_op_name(op);
    if (reducer.dtype == 0)
      return refuse("NVLink switches cannot compute %s of %s; phalanx/cuda.h lists what they can", op_name,
                    phx_dtype_name(dtype));
    const std::string pair = std::string(phx_dtype_name(reducer.dtype)) + "_" + op_name;
    const std::string to_out = "phx_gpu_multimem_reduce_" + pair, to_all = "phx_gpu_multimem_reduce_to_all_" + pair;
    if (call_.kind() != Kind::kAllReduce) return {to_out, reducer.times, {}, false};
    if (buffers.in == buffers.out) return {to_all, reducer.times, in_place(), true};
    // Each rank may load the result itself only if the order in which a switch reduces cannot change it.
    const bool any_order = !is_floating(dtype) || (call_.group_size() == 2 && op == PHX_OP_SUM);
    if (any_order) return {to_out, reducer.times, {}, false};
    const cuda::Spread spread = find_place(call_, symm_, buffers.count * buffers.item);
    if (spread.place == 0 || (spread.offset - offset_) % sizeof(uint64_t[2]) != 0)
      return refuse(
          "if each of %d ranks loaded the %s of %s from the switches, the bits of their results could differ; "
          "reduce in place, or put out into symmetric memory of group '%s', at the same offset on all ranks, aligned "
          "as the input",
          call_.group_size(), op_name, phx_dtype_name(dtype), call_.group().name().c_str());
    call_.gives_at(spread.place);
    return {to_all, reducer.times, spread, true};
  }

  Call &call_;
  Symm &symm_;
  const size_t offset_;
  const bool wants_;
};

}  // namespace

void refuse_multimem(Call &call) {
  if (call.ok() && call.options().algo == PHX_ALGO_MULTIMEM)
    call.refuse(fail(PHX_ERR_UNSUPPORTED, call.name(),
                     "PHX_ALGO_MULTIMEM does not serve this call; it serves all_reduce, reduce_scatter, reduce and "
                     "all_gather with one count for all ranks, and broadcasts of symmetric memory"));
}

MultimemWay choose_multimem(Call &call, Symm &symm, size_t offset) { return Chooser(call, symm, offset).choose(); }

}  // namespace phx
