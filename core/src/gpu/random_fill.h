// Fills a box on a GPU, with the same bits as on the CPU, from the same source (kernels/random_kinds.h). A thread makes
// one element at a time. Compiled without contraction: nvcc --fmad=false.
#pragma once

#include "gpu/block.h"
#include "kernels/random_kinds.h"

namespace phx::random {
namespace {

// Where element `number` of the box lies in the tensor and in the output. The last dim varies fastest.
PHX_DEVICE void place(const DeviceFill &fill, int64_t number, uint64_t *index, int64_t *out) {
  uint64_t element = fill.first;
  int64_t to = 0;
  for (int d = fill.ndim - 1; d >= 0; --d) {
    const Dim &dim = fill.dims[d];
    const int64_t position = number % dim.size;
    number /= dim.size;
    element += static_cast<uint64_t>(position * dim.index_stride);
    to += position * dim.out_stride;
  }
  *index = element;
  *out = to;
}

PHX_DEVICE void word_at(uint64_t key, uint64_t index, uint32_t *word) {
  const Block block = block_of(key, index / 4);
  *word = block.word[index % 4];
}
PHX_DEVICE void word_at(uint64_t key, uint64_t index, uint64_t *word) {
  const Block block = block_of(key, index / 2);
  const int low = static_cast<int>(index % 2) * 2;
  *word = block.word[low] | static_cast<uint64_t>(block.word[low + 1]) << 32;
}

template <class Kind>
PHX_DEVICE void fill_on_gpu(const DeviceFill &fill) {
  const typename Kind::Constants constants(fill.settings);
  auto *const out = static_cast<typename Kind::Out *>(fill.out);
  const int64_t step = static_cast<int64_t>(cuda::threads_of_grid());
  for (int64_t i = static_cast<int64_t>(cuda::thread_of_grid()); i < fill.count; i += step) {
    uint64_t index = 0;
    int64_t to = 0;
    place(fill, i, &index, &to);
    typename Kind::Word word;
    if constexpr (Kind::kPaired) {
      typename Kind::Word other;
      word_at(fill.key, index & ~uint64_t{1}, &word);
      word_at(fill.key, index | 1, &other);
      const auto pair = Kind::real(word, other, constants);
      out[to] = Element<typename Kind::Out>::store((index & 1) != 0 ? pair.second : pair.first);
    } else {
      word_at(fill.key, index, &word);
      out[to] = Kind::element(word, constants);
    }
  }
}

}  // namespace
}  // namespace phx::random
