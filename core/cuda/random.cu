// Random elements on a GPU, by name: phx_gpu_random_, the kind, and a dtype as phx_dtype_name calls it. Dtypes of which
// the same bits come out have one kernel: see name_of in src/gpu/random.cpp. Part of the image of collectives.cu.
//
//   nvcc -std=c++17 -O3 --fmad=false -Icore/include -Icore/src -cubin -arch=sm_90 core/cuda/random.cu
#include "gpu/random_fill.h"

namespace phx::random {

#define PHX_RANDOM(kind, dtype, ...) \
  extern "C" __global__ void phx_gpu_random_##kind##_##dtype(const DeviceFill fill) { fill_on_gpu<__VA_ARGS__>(fill); }

#define PHX_RANDOM_FLOATING(kind, Kind)  \
  PHX_RANDOM(kind, float16, Kind<F16>)   \
  PHX_RANDOM(kind, bfloat16, Kind<BF16>) \
  PHX_RANDOM(kind, float32, Kind<float>) \
  PHX_RANDOM(kind, float64, Kind<double>)

#define PHX_RANDOM_INTEGERS(kind, Word)              \
  PHX_RANDOM(kind, bool, Integers<Truth, Word>)      \
  PHX_RANDOM(kind, uint8, Integers<uint8_t, Word>)   \
  PHX_RANDOM(kind, uint16, Integers<uint16_t, Word>) \
  PHX_RANDOM(kind, uint32, Integers<uint32_t, Word>) \
  PHX_RANDOM(kind, uint64, Integers<uint64_t, Word>) \
  PHX_RANDOM(kind, float16, Integers<F16, Word>)     \
  PHX_RANDOM(kind, bfloat16, Integers<BF16, Word>)   \
  PHX_RANDOM(kind, float32, Integers<float, Word>)   \
  PHX_RANDOM(kind, float64, Integers<double, Word>)

PHX_RANDOM(bits, uint32, Bits<uint32_t>)
PHX_RANDOM(bits, uint64, Bits<uint64_t>)
PHX_RANDOM_FLOATING(uniform, Uniform)
PHX_RANDOM_FLOATING(normal, Normal)
PHX_RANDOM_FLOATING(exponential, Exponential)
PHX_RANDOM_FLOATING(cauchy, Cauchy)
PHX_RANDOM_FLOATING(log_normal, LogNormal)
PHX_RANDOM(bernoulli, uint8, Bernoulli<uint8_t, 1>)
PHX_RANDOM(bernoulli, uint16, Bernoulli<uint16_t, 1>)
PHX_RANDOM(bernoulli, uint32, Bernoulli<uint32_t, 1>)
PHX_RANDOM(bernoulli, uint64, Bernoulli<uint64_t, 1>)
PHX_RANDOM(bernoulli, float16, Bernoulli<uint16_t, 0x3c00>)
PHX_RANDOM(bernoulli, bfloat16, Bernoulli<uint16_t, 0x3f80>)
PHX_RANDOM(bernoulli, float32, Bernoulli<uint32_t, 0x3f800000>)
PHX_RANDOM(bernoulli, float64, Bernoulli<uint64_t, 0x3ff0000000000000>)
PHX_RANDOM_INTEGERS(narrow, uint32_t)
PHX_RANDOM_INTEGERS(wide, uint64_t)

}  // namespace phx::random
