#include "collectives/enqueue.h"

#include <string>

#include "base/error.h"
#include "cuda/side.h"

namespace phx {
namespace {

bool is_signed(int32_t dtype) { return dtype == PHX_I8 || dtype == PHX_I16 || dtype == PHX_I32 || dtype == PHX_I64; }

// A kernel of core/cuda/collectives.cu, which has one for all pairs of dtype and op that give the same bits.
struct Reducer {
  int32_t dtype;
  int32_t op;
  size_t times;  // elements of the kernel for each of the call
};
Reducer reducer_of(int32_t dtype, int32_t op) {
  if (is_signed(dtype) && op != PHX_AVG && op != PHX_MIN && op != PHX_MAX) return {dtype + 1, op, 1};
  if (dtype == PHX_BOOL)
    return {dtype, op == PHX_BXOR ? op : op == PHX_SUM || op == PHX_MAX || op == PHX_BOR ? PHX_BOR : PHX_BAND, 1};
  if ((dtype == PHX_C64 || dtype == PHX_C128) && op != PHX_PROD) return {dtype == PHX_C64 ? PHX_F32 : PHX_F64, op, 2};
  return {dtype, op, 1};
}
static_assert(PHX_U8 == PHX_I8 + 1 && PHX_U16 == PHX_I16 + 1 && PHX_U32 == PHX_I32 + 1 && PHX_U64 == PHX_I64 + 1);

std::string name_of(const Reducer &reducer, bool in_place) {
  return std::string("phx_gpu_reduce_") + (in_place ? "in_place_" : "") + phx_dtype_name(reducer.dtype) + "_" +
         phx_reduce_op_name(reducer.op);
}

}  // namespace

phx_status enqueue(Call &call, Symm &symm, size_t offset, int root, phx_work **work) {
  const Group &group = call.group();
  cuda::Side &side = *symm.side();
  const Buffers &buffers = call.buffers();
  if (work != nullptr)
    return call
        .refuse(fail(PHX_ERR_UNSUPPORTED, call.name(),
                     "%s: on memory of a GPU the stream is what is waited for; set work to NULL", call.name()))
        .status();
  const bool empty = buffers.count == 0;
  if (!empty && buffers.out != buffers.in && !side.reaches(buffers.out))
    return call.refuse(fail(PHX_ERR_INVALID, call.name(), "%s: out is no memory that the GPU can reach", call.name()))
        .status();

  const size_t n = group.size(), block = buffers.count * buffers.item;
  cuda::Launch launch{};
  launch.offset = offset;
  launch.out = buffers.out;
  launch.count = buffers.count;
  launch.root = root;
  launch.channel = side.own_channel();
  launch.divisor = static_cast<int64_t>(n);
  launch.scale = call.reduction().scale;
  const Reducer reducer = reducer_of(call.reduction().dtype, call.reduction().op);
  const bool in_place = buffers.in == buffers.out;
  std::string kernel;
  const size_t *item = &buffers.item;
  size_t bytes = block;
  switch (call.kind()) {
    case Kind::kSymmAllReduce:
    case Kind::kSymmReduceScatter:
      kernel = name_of(reducer, in_place);
      launch.count *= reducer.times;
      if (call.kind() == Kind::kSymmReduceScatter) launch.begin = launch.count * group.group_rank();
      if (in_place) bytes = block / n;
      item = nullptr;
      break;
    case Kind::kSymmAllGather: kernel = "phx_gpu_all_gather"; break;
    case Kind::kSymmAllToAll: kernel = "phx_gpu_all_to_all"; break;
    case Kind::kSymmBroadcast: kernel = "phx_gpu_broadcast"; break;
    default:
      return call
          .refuse(fail(PHX_ERR_UNSUPPORTED, call.name(), "%s: there is no kernel of it for GPUs yet", call.name()))
          .status();
  }
  if (empty) kernel.clear();  // there is nothing to do, but the calls must agree
  return symm.launch(call.name(), kernel, launch, &call.record(), call.timeout_ms(), bytes, item,
                     call.options().stream);
}

}  // namespace phx
