#include "ops/enqueue.h"

#include "gpu/gpu_group.h"
#include "symm/table.h"

namespace phx {
namespace {

constexpr size_t kPackBytes = 16;  // what one thread loads at once
constexpr const char *kBarrier = "phx_gpu_barrier";

bool is_signed(int32_t dtype) {
  return dtype == PHX_DTYPE_I8 || dtype == PHX_DTYPE_I16 || dtype == PHX_DTYPE_I32 || dtype == PHX_DTYPE_I64;
}

// The kernel of core/cuda/collectives.cu for a dtype and op.
Reducer reducer_of(int32_t dtype, int32_t op) {
  if (is_signed(dtype) && op != PHX_OP_AVG && op != PHX_OP_MIN && op != PHX_OP_MAX) return {dtype + 1, op, 1};
  if (dtype == PHX_DTYPE_BOOL)
    return {dtype,
            op == PHX_OP_BXOR                                          ? op
            : op == PHX_OP_SUM || op == PHX_OP_MAX || op == PHX_OP_BOR ? PHX_OP_BOR
                                                                       : PHX_OP_BAND,
            1};
  if ((dtype == PHX_DTYPE_C64 || dtype == PHX_DTYPE_C128) && op != PHX_OP_PROD)
    return {dtype == PHX_DTYPE_C64 ? PHX_DTYPE_F32 : PHX_DTYPE_F64, op, 2};
  return {dtype, op, 1};
}
static_assert(PHX_DTYPE_U8 == PHX_DTYPE_I8 + 1 && PHX_DTYPE_U16 == PHX_DTYPE_I16 + 1 &&
              PHX_DTYPE_U32 == PHX_DTYPE_I32 + 1 && PHX_DTYPE_U64 == PHX_DTYPE_I64 + 1);

// How kernels reduce: the inputs into `out`, in place on all ranks, or data of the LL protocol into `out`.
enum class Form { kIntoOut, kInPlace, kLowLatency };

std::string name_of(const Reducer &reducer, Form form) {
  return std::string("phx_gpu_reduce_") +
         (form == Form::kInPlace      ? "in_place_"
          : form == Form::kLowLatency ? "lines_"
                                      : "") +
         phx_dtype_name(reducer.dtype) + "_" + phx_op_name(reducer.op);
}

// A call that is being put on a stream.
class Enqueued {
 public:
  Enqueued(Call &call, Symm &symm, size_t offset, const cuda::Inputs *inputs, phx_work **work)
      : call_(call), symm_(symm) {
    if (work != nullptr)
      call.refuse(
          fail(PHX_ERR_UNSUPPORTED, call.name(), "work must be NULL for GPU memory; wait for the stream instead"));
    const Buffers &buffers = call.buffers();
    launch_.offset = offset;
    launch_.in = buffers.in;
    launch_.out = buffers.out;
    launch_.count = buffers.count;
    launch_.item = buffers.item;
    launch_.root = call.root();
    launch_.channel = gpu_symm_of(symm)->own_channel();
    launch_.divisor = call.group_size();
    launch_.scale = call.reduction().scale;
    if (inputs != nullptr) launch_.inputs = *inputs;
  }

  // Checks that the GPU can reach `out`, if this rank gets a result.
  void check_out(bool gets_result) {
    const Buffers &buffers = call_.buffers();
    if (call_.ok() && gets_result && buffers.out != buffers.in && !gpu_symm_of(symm_)->reaches(buffers.out))
      call_.refuse(fail(PHX_ERR_INVALID, call_.name(),
                        "out is not memory that this GPU can reach; allocate it on the GPU of the symmetric memory"));
  }
  // The counts of the call. If it has one list, that is the list of inputs and of outputs.
  const cuda::Lists *lists() {
    const size_t *in = call_.buffers().lists->in_counts, *out = call_.buffers().lists->out_counts;
    const int n = call_.group_size();
    if (n > cuda::kMostListed)
      call_.refuse(fail(PHX_ERR_UNSUPPORTED, call_.name(),
                        "at most %d ranks of a group may use GPU memory, and this group has %d", cuda::kMostListed, n));
    else
      for (int i = 0; i < n; ++i) {
        lists_.in[i] = (in != nullptr ? in : out)[i];
        lists_.out[i] = (out != nullptr ? out : in)[i];
      }
    return &lists_;
  }
  // Sets up the launch to reduce `count` elements from `begin` on, and returns the name of the kernel.
  std::string reduce_kernel(size_t begin, Form form = Form::kIntoOut) {
    const Reducer reducer = reducer_of(call_.reduction().dtype, call_.reduction().op);
    launch_.count *= reducer.times;
    launch_.begin = begin * reducer.times;
    return name_of(reducer, form);
  }
  // Runs a kernel that uses NVLink switches. `begin`: the first element that this rank reduces.
  phx_status run(const MultimemWay &way, size_t begin) {
    const Buffers &buffers = call_.buffers();
    const size_t bytes = buffers.count * buffers.item, n = call_.group_size();
    launch_.spread = way.spread;
    launch_.count = buffers.count * way.times;
    launch_.begin = begin * way.times;
    return run(way.kernel, way.shares ? (bytes + n - 1) / n : bytes);
  }
  // `bytes` determines the size of the grid, the same on all ranks. With 0 nothing is done, but the calls are compared.
  phx_status run(const std::string &kernel, size_t bytes, const cuda::Lists *lists = nullptr) {
    if (bytes == 0) return put("", call_.uncompared(), 0, lists);
    const size_t packs_of_thread = gpu_of(call_.group()).tuning().thread_bytes / kPackBytes;
    return put(kernel, call_.uncompared(), (bytes - 1) / packs_of_thread + 1, lists);
  }
  // Runs a kernel in which each thread handles `kPackBytes`.
  phx_status run_by_packs(const std::string &kernel, size_t bytes) {
    return put(bytes == 0 ? "" : kernel, call_.uncompared(), bytes, nullptr);
  }
  phx_status run_barrier() { return put(kBarrier, call_.uncompared(), 0, nullptr); }
  // all_gather by the GPU's copy engines, between two barriers: every input is ready after the first, and no rank goes
  // on before the second.
  phx_status gather_by_copies(size_t bytes) {
    phx_status status = run_barrier();
    const int n = call_.group_size(), self = symm_.group_rank();
    for (int i = 0; i < n && status == PHX_OK; ++i) {
      const int from = (self + i) % n;
      status = gpu_symm_of(symm_)->copy(call_.name(), call_.buffers().out + from * bytes,
                                        symm_.buffer(from) + launch_.offset, bytes, call_.gpu().stream);
      if (status != PHX_OK) return call_.group().fail_with(last_error(), true);  // the others wait for this rank
    }
    return status == PHX_OK ? put(kBarrier, nullptr, 0, nullptr) : status;
  }

 private:
  phx_status put(const std::string &kernel, const CallRecord *record, size_t bytes, const cuda::Lists *lists) {
    if (!call_.ok()) return call_.status();
    return phx::launch(symm_, call_.name(), kernel, launch_, record, call_.timeout_ms(), bytes, lists,
                       call_.gpu().stream);
  }

  Call &call_;
  Symm &symm_;
  cuda::Launch launch_{};
  cuda::Lists lists_{};
};

// Whether copy engines make this all_gather.
bool is_copied(const Call &call) {
  const size_t bytes = call.buffers().count * call.buffers().item * static_cast<size_t>(call.group_size());
  return call.options().algo == PHX_ALGO_AUTO && bytes != 0 && bytes >= gpu_of(call.group()).tuning().copy_bytes;
}

}  // namespace

// The LL protocol sends 8 bytes at a time, which do not hold the complex128 that a multiplication needs as a whole.
bool fits_lines(const Call &call, const Symm &symm) {
  const Reducer reducer = reducer_of(call.reduction().dtype, call.reduction().op);
  return call.options().algo == PHX_ALGO_AUTO && reducer.dtype != PHX_DTYPE_C128 &&
         call.buffers().count * call.buffers().item <=
             std::min<size_t>(gpu_symm_of(symm)->line_bytes(), gpu_of(call.group()).tuning().line_bytes);
}

phx_status enqueue(Call &call, Symm &symm, size_t offset, const cuda::Inputs *inputs, phx_work **work) {
  const Buffers &buffers = call.buffers();
  const Kind kind = call.kind();
  const int size = call.group_size(), self = symm.group_rank();
  const size_t n = size, bytes = buffers.count * buffers.item;
  const Blocks in = input_blocks(buffers, size), out = output_blocks(buffers, size);
  const bool listed = buffers.lists != nullptr;
  if (listed) refuse_multimem(call);
  Enqueued enqueued(call, symm, offset, inputs, work);
  enqueued.check_out(parts_on(traits_of(kind).out, n, self == call.root()) != 0 && out.total() != 0);
  if (!listed && kind != Kind::kBarrier)
    if (const MultimemWay multimem = choose_multimem(call, symm, offset); !multimem.kernel.empty())
      return enqueued.run(multimem, kind == Kind::kReduceScatter ? in.start(self) : 0);
  switch (kind) {
    case Kind::kBarrier: return enqueued.run_barrier();
    case Kind::kAllReduce: {
      if (fits_lines(call, symm))
        return enqueued.run_by_packs(enqueued.reduce_kernel(0, Form::kLowLatency), 2 * bytes);  // 8 bytes per thread
      if (buffers.in != buffers.out) return enqueued.run(enqueued.reduce_kernel(0), bytes);
      return enqueued.run(enqueued.reduce_kernel(0, Form::kInPlace), (bytes + n - 1) / n);
    }
    case Kind::kReduceScatter:
    case Kind::kReduceScatterV:
      return enqueued.run(enqueued.reduce_kernel(in.start(self)), in.largest() * buffers.item);
    case Kind::kReduce: return enqueued.run(enqueued.reduce_kernel(0), bytes);
    case Kind::kAllGather:  // for copies the host must know where the inputs of the other ranks lie
      if (inputs == nullptr && is_copied(call)) return enqueued.gather_by_copies(bytes);
      [[fallthrough]];
    case Kind::kGather: return enqueued.run("phx_gpu_all_gather", bytes);
    case Kind::kAllGatherV: return enqueued.run("phx_gpu_all_gather_v", out.largest() * buffers.item, enqueued.lists());
    case Kind::kAllToAll: return enqueued.run("phx_gpu_all_to_all", bytes);
    case Kind::kAllToAllV:  // no rank knows all sizes, so the grid is as large as it may be
      return enqueued.run(call.symmetric() ? "phx_gpu_all_to_all_v" : "phx_gpu_all_to_all_v_slots", SIZE_MAX,
                          enqueued.lists());
    case Kind::kBroadcast:  // on ordinary memory it is out of place
      return enqueued.run(call.symmetric() ? "phx_gpu_broadcast" : "phx_gpu_fetch", bytes);
    case Kind::kScatter: return enqueued.run("phx_gpu_scatter", bytes);
    default:
      return call.refuse(fail(PHX_ERR_UNSUPPORTED, call.name(),
                              "this library has no GPU kernel for this call; copy the data to the host"));
  }
}

}  // namespace phx
