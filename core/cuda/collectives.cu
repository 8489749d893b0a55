// The kernels by name, for the driver to find: phx_gpu_, what is done, dtype and op as phx_dtype_name and
// phx_op_name call them.
// Pairs that give the same bits have one kernel: signed integers are added, multiplied and combined bit by bit as
// unsigned ones, and all but the product of complex numbers is that of twice as many reals.
//
//   nvcc -std=c++17 -O3 --fmad=false -Icore/include -Icore/src -cubin -arch=sm_90 core/cuda/collectives.cu
#include "gpu/messages.h"
#include "gpu/move.h"
#include "gpu/multimem.h"
#include "gpu/reduce.h"

using namespace phx::cuda;
using namespace phx::kernels;

#define PHX_LARGE(dtype, op, E, Op)                                                                           \
  extern "C" __global__ void phx_gpu_reduce_##dtype##_##op(Launch launch) { reduce_into_out<E, Op>(launch); } \
  extern "C" __global__ void phx_gpu_reduce_in_place_##dtype##_##op(Launch launch) { reduce_in_place<E, Op>(launch); }

// All but what is larger than the data of a Line.
#define PHX_PAIR(dtype, op, E, Op) \
  PHX_LARGE(dtype, op, E, Op)      \
  extern "C" __global__ void phx_gpu_reduce_lines_##dtype##_##op(Launch launch) { reduce_lines<E, Op>(launch); }

#define PHX_ORDERED(dtype, E)      \
  PHX_PAIR(dtype, avg, E, Average) \
  PHX_PAIR(dtype, min, E, Minimum) \
  PHX_PAIR(dtype, max, E, Maximum)

#define PHX_FLOATING(dtype, E)              \
  PHX_PAIR(dtype, sum, E, Sum)              \
  PHX_PAIR(dtype, product, E, Product)      \
  PHX_PAIR(dtype, premul_sum, E, PremulSum) \
  PHX_ORDERED(dtype, E)

#define PHX_BITWISE(dtype, E)      \
  PHX_PAIR(dtype, band, E, BitAnd) \
  PHX_PAIR(dtype, bor, E, BitOr)   \
  PHX_PAIR(dtype, bxor, E, BitXor)

#define PHX_UNSIGNED(dtype, E)         \
  PHX_PAIR(dtype, sum, E, Sum)         \
  PHX_PAIR(dtype, product, E, Product) \
  PHX_BITWISE(dtype, E)                \
  PHX_ORDERED(dtype, E)

PHX_FLOATING(float16, F16)
PHX_FLOATING(bfloat16, BF16)
PHX_FLOATING(float32, float)
PHX_FLOATING(float64, double)
PHX_FLOATING(float8_e4m3fn, F8E4M3)
PHX_FLOATING(float8_e5m2, F8E5M2)
PHX_UNSIGNED(uint8, uint8_t)
PHX_UNSIGNED(uint16, uint16_t)
PHX_UNSIGNED(uint32, uint32_t)
PHX_UNSIGNED(uint64, uint64_t)
PHX_ORDERED(int8, int8_t)
PHX_ORDERED(int16, int16_t)
PHX_ORDERED(int32, int32_t)
PHX_ORDERED(int64, int64_t)
PHX_BITWISE(bool, Bool)
PHX_PAIR(complex64, product, Complex<float>, Product)
PHX_LARGE(complex128, product, Complex<double>, Product)

extern "C" __global__ void phx_gpu_all_gather(Launch launch) { all_gather(launch); }
extern "C" __global__ void phx_gpu_all_to_all(Launch launch) { all_to_all(launch); }
extern "C" __global__ void phx_gpu_broadcast(Launch launch) { broadcast(launch); }
extern "C" __global__ void phx_gpu_scatter(Launch launch) { scatter(launch); }
extern "C" __global__ void phx_gpu_fetch(Launch launch) { fetch(launch); }
extern "C" __global__ void phx_gpu_all_gather_v(Launch launch, Lists lists) { all_gather_v(launch, lists); }
extern "C" __global__ void phx_gpu_all_to_all_v(Launch launch, Lists lists) { all_to_all_v(launch, lists); }

extern "C" __global__ void phx_gpu_all_to_all_v_slots(Launch launch, Lists lists) {
  all_to_all_v_by_slots(launch, lists);
}

extern "C" __global__ void phx_gpu_barrier(Launch launch) { barrier(launch); }
extern "C" __global__ void phx_gpu_put_signal(Launch launch) { put_signal(launch); }
extern "C" __global__ void phx_gpu_wait_signal(Launch launch) { wait_signal(launch); }

extern "C" __global__ void phx_gpu_messages(const Exchange launch) { exchange_messages(launch); }

// By NVLink switches, which GPUs before sm_90 do not have.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define PHX_MULTIMEM(dtype, op, E, Op)                                                                                 \
  extern "C" __global__ void phx_gpu_multimem_reduce_##dtype##_##op(Launch launch) { multimem_reduce<E, Op>(launch); } \
  extern "C" __global__ void phx_gpu_multimem_reduce_to_all_##dtype##_##op(Launch launch) {                            \
    multimem_reduce_to_all<E, Op>(launch);                                                                             \
  }
#define PHX_MULTIMEM_RANGE(dtype, E)   \
  PHX_MULTIMEM(dtype, min, E, Minimum) \
  PHX_MULTIMEM(dtype, max, E, Maximum)

PHX_MULTIMEM(float32, sum, float, Sum)
PHX_MULTIMEM(float64, sum, double, Sum)
PHX_MULTIMEM(float16, sum, F16, Sum)
PHX_MULTIMEM(bfloat16, sum, BF16, Sum)
PHX_MULTIMEM(uint32, sum, uint32_t, Sum)
PHX_MULTIMEM(uint64, sum, uint64_t, Sum)
PHX_MULTIMEM_RANGE(float16, F16)
PHX_MULTIMEM_RANGE(bfloat16, BF16)
PHX_MULTIMEM_RANGE(uint32, uint32_t)
PHX_MULTIMEM_RANGE(int32, int32_t)
PHX_MULTIMEM_RANGE(uint64, uint64_t)
PHX_MULTIMEM_RANGE(int64, int64_t)
PHX_MULTIMEM(uint8, band, uint8_t, BitAnd)  // of any integers
PHX_MULTIMEM(uint8, bor, uint8_t, BitOr)
PHX_MULTIMEM(uint8, bxor, uint8_t, BitXor)

extern "C" __global__ void phx_gpu_multimem_all_gather(Launch launch) { multimem_all_gather(launch); }
extern "C" __global__ void phx_gpu_multimem_broadcast(Launch launch) { multimem_broadcast(launch); }
#endif

#include "random.cu"  // one image has all kernels
