// Random elements on a GPU: the same bits as on the CPU, from the same source (src/random/kinds.h).
//
//   nvcc -std=c++17 -O3 --fmad=false -Icore/include -Icore/src -Xcompiler -fPIC -shared core/cuda/random.cu
//
// --fmad=false: a fused multiply-add would round differently. One thread makes two elements of a pair, or one.
#include <cuda_runtime.h>

#include "random/kinds.h"

namespace phx::random {
namespace {

constexpr int kMaxDims = 8;  // after dims that run on in each other were joined

// The box of phx_random_fill, in the order in which its elements are counted.
struct DeviceBox {
  uint64_t first;
  int64_t count;
  int ndim;
  int64_t sizes[kMaxDims], index_strides[kMaxDims], out_strides[kMaxDims];
};

__device__ __forceinline__ void place(const DeviceBox &box, int64_t number, uint64_t *index, int64_t *out) {
  uint64_t element = box.first;
  int64_t to = 0;
  for (int d = box.ndim - 1; d >= 0; --d) {
    const int64_t position = number % box.sizes[d];
    number /= box.sizes[d];
    element += static_cast<uint64_t>(position * box.index_strides[d]);
    to += position * box.out_strides[d];
  }
  *index = element;
  *out = to;
}

__device__ __forceinline__ void words_at(uint64_t key, uint64_t index, uint32_t *word) {
  const Block block = block_of(key, index / 4);
  *word = block.word[index % 4];
}
__device__ __forceinline__ void words_at(uint64_t key, uint64_t index, uint64_t *word) {
  const Block block = block_of(key, index / 2);
  const int low = static_cast<int>(index % 2) * 2;
  *word = block.word[low] | static_cast<uint64_t>(block.word[low + 1]) << 32;
}

template <class Kind>
__global__ void fill_kernel(typename Kind::Out *out, uint64_t key, Settings settings, DeviceBox box) {
  const typename Kind::Constants constants(settings);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < box.count; i += step) {
    uint64_t index;
    int64_t to;
    place(box, i, &index, &to);
    typename Kind::Word word;
    if constexpr (Kind::kPaired) {
      typename Kind::Word other;
      words_at(key, index & ~uint64_t{1}, &word);
      words_at(key, index | 1, &other);
      const auto two = Kind::real(word, other, constants);
      out[to] = Element<typename Kind::Out>::store((index & 1) != 0 ? two.second : two.first);
    } else {
      words_at(key, index, &word);
      out[to] = Kind::one(word, constants);
    }
  }
}

using Launch = void (*)(void *out, uint64_t key, const Settings &, const DeviceBox &, cudaStream_t);

struct Launches {
  using Fn = Launch;
  template <class Kind>
  static Launch get() {
    return [](void *out, uint64_t key, const Settings &settings, const DeviceBox &box, cudaStream_t stream) {
      constexpr int kThreads = 256;
      const int64_t blocks = (box.count + kThreads - 1) / kThreads, most = 1 << 16;
      fill_kernel<Kind><<<static_cast<unsigned>(blocks < most ? blocks : most), kThreads, 0, stream>>>(
          static_cast<typename Kind::Out *>(out), key, settings, box);
    };
  }
};

}  // namespace
}  // namespace phx::random

// As the kernels of the CPU take it (src/random/random.h): settings that were checked. Returns a cudaError_t.
extern "C" int phx_random_fill_cuda(void *out, int32_t dtype, int32_t kind, double offset, double scale, double bound,
                                    uint64_t limit, int64_t low, uint64_t range, uint64_t key, uint64_t first,
                                    int32_t ndim, const int64_t *sizes, const int64_t *index_strides,
                                    const int64_t *out_strides, void *stream) {
  using namespace phx::random;
  DeviceBox box{first, 1, 0, {}, {}, {}};
  for (int32_t d = 0; d < ndim; ++d) {
    box.count *= sizes[d];
    if (sizes[d] == 1) continue;
    const int before = box.ndim - 1;
    if (before >= 0 && box.index_strides[before] == sizes[d] * index_strides[d] &&
        box.out_strides[before] == sizes[d] * out_strides[d]) {
      box.sizes[before] *= sizes[d];
      box.index_strides[before] = index_strides[d];
      box.out_strides[before] = out_strides[d];
      continue;
    }
    if (box.ndim == kMaxDims) return cudaErrorInvalidValue;
    box.sizes[box.ndim] = sizes[d];
    box.index_strides[box.ndim] = index_strides[d];
    box.out_strides[box.ndim++] = out_strides[d];
  }
  if (box.count == 0) return cudaSuccess;
  const Launch launch = select<Launches>(kind, dtype);
  if (launch == nullptr) return cudaErrorNotSupported;
  launch(out, key, {offset, scale, bound, limit, low, range}, box, static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}
