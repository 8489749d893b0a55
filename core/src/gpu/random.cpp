#include "gpu/random.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "gpu/stream_order.h"

namespace phx::random {
namespace {

constexpr int32_t kThreads = 256;          // of a block
constexpr int64_t kBlocksOfProcessor = 8;  // blocks that a processor runs at once

constexpr const char *kKindNames[] = {"bits",      "uniform", "normal",    "exponential",
                                      "bernoulli", "cauchy",  "log_normal"};  // from PHX_RANDOM_BITS on
static_assert(PHX_RANDOM_LOG_NORMAL - PHX_RANDOM_BITS + 1 == sizeof kKindNames / sizeof kKindNames[0]);

// The name of a kernel in core/cuda/random.cu. Signed integers use the kernel of unsigned ones, which gives the same
// bits, and so does a Bernoulli bool, whose 0 and 1 are those of a byte.
std::string name_of(int32_t kind, int32_t dtype) {
  const bool is_signed =
      dtype == PHX_DTYPE_I8 || dtype == PHX_DTYPE_I16 || dtype == PHX_DTYPE_I32 || dtype == PHX_DTYPE_I64;
  if (kind == PHX_RANDOM_BERNOULLI && dtype == PHX_DTYPE_BOOL) dtype = PHX_DTYPE_U8;
  const char *const name = kind == kNarrowIntegers ? "narrow"
                           : kind == kWideIntegers ? "wide"
                                                   : kKindNames[kind - PHX_RANDOM_BITS];
  return std::string("phx_gpu_random_") + name + "_" + phx_dtype_name(is_signed ? dtype + 1 : dtype);
}
static_assert(PHX_DTYPE_U8 == PHX_DTYPE_I8 + 1 && PHX_DTYPE_U16 == PHX_DTYPE_I16 + 1 &&
              PHX_DTYPE_U32 == PHX_DTYPE_I32 + 1 && PHX_DTYPE_U64 == PHX_DTYPE_I64 + 1);

}  // namespace

phx_status fill_on_gpu(const char *operation, const phx_device &device, void *stream, int32_t kind, int32_t dtype,
                       void *out, uint64_t key, const Settings &settings, const Box &box) {
  DeviceFill fill{out, key, settings, box.first, 1, 0, {}};
  fill.ndim = simplify(box, fill.dims);
  if (fill.ndim < 0) return PHX_OK;
  for (int32_t d = 0; d < fill.ndim; ++d) fill.count *= fill.dims[d].size;
  std::string problem;
  cuda::Gpus *const gpus = cuda::gpus_of_process(&problem);
  if (gpus == nullptr) return fail(PHX_ERR_UNSUPPORTED, operation, "%s", problem.c_str());
  cuda::Gpu gpu;
  PHX_TRY(gpus->get(operation, device.index, &gpu));
  const int32_t threads = std::min(kThreads, gpu.most_threads);
  cuda::Function function = nullptr;
  PHX_TRY(gpus->kernel(operation, gpu, name_of(kind, dtype), threads, &function));
  if (!cuda::reaches(gpus->driver(), gpu, out))
    return fail(PHX_ERR_INVALID, operation,
                "out is not memory that this GPU can reach; allocate it on the GPU that device names");
  const int64_t worth = (fill.count + threads - 1) / threads;
  void *parameters[] = {&fill};
  return cuda::launch_kernel(operation, gpus->driver(), gpu, function,
                             std::min(worth, kBlocksOfProcessor * gpu.processors), threads, stream, parameters);
}

}  // namespace phx::random
