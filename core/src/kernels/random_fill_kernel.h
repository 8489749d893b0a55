// The loop that fills a range of elements: it computes some blocks of random words, which stay in the first-level
// cache, and then converts these to elements.
//
// Isa::blocks(words, key, number, count) writes the words of `count` blocks from `number` on, and may write up to the
// next multiple of Isa::kWidth blocks. The conversion is plain code, which the compiler vectorizes.
#pragma once

#include "kernels/random_kinds.h"

namespace phx::random {
namespace {

constexpr size_t kBlocks = 256;  // 4 KiB of words, which fit well into the first-level cache with their elements

template <class Kind>
inline typename Kind::Word word_at(const uint32_t *words, size_t at) {
  typename Kind::Word word;
  memcpy(&word, words + at * (sizeof word / 4), sizeof word);  // every target is little-endian
  return word;
}

template <class Kind>
inline void convert(typename Kind::Out *out, const uint32_t *words, size_t count,
                    const typename Kind::Constants &constants) {
  if constexpr (Kind::kPaired) {
    // Through a buffer, because the compiler does not vectorize pairs that are stored as another type.
    using Real = typename Kind::Real;
    constexpr size_t kStep = 256;
    alignas(64) Real buffer[kStep];
    for (size_t at = 0; at < count; at += kStep) {
      const size_t taken = count - at < kStep ? count - at : kStep;
      for (size_t i = 0; i < taken; i += 2) {
        const auto pair = Kind::real(word_at<Kind>(words, at + i), word_at<Kind>(words, at + i + 1), constants);
        buffer[i] = pair.first;
        buffer[i + 1] = pair.second;
      }
      for (size_t i = 0; i < taken; ++i) out[at + i] = Element<typename Kind::Out>::store(buffer[i]);
    }
  } else {
    for (size_t i = 0; i < count; ++i) out[i] = Kind::element(word_at<Kind>(words, i), constants);
  }
}

template <class Isa>
struct Fill {
  using Fn = FillFn;
  template <class Kind>
  static FillFn get() {
    return &run<Kind>;
  }

  template <class Kind>
  static void run(void *to, size_t count, uint64_t first, uint64_t key, const Settings &settings) {
    using Out = typename Kind::Out;
    constexpr size_t kPerBlock = 16 / sizeof(typename Kind::Word), kChunk = kBlocks * kPerBlock;
    static_assert(kBlocks % Isa::kWidth == 0, "blocks() may write up to the next multiple of kWidth");
    const typename Kind::Constants constants(settings);
    alignas(64) uint32_t words[kBlocks * 4];
    alignas(64) Out buffer[kChunk];
    Out *out = static_cast<Out *>(to);
    while (count > 0) {
      const size_t skip = static_cast<size_t>(first % kPerBlock);
      const size_t taken = count < kChunk - skip ? count : kChunk - skip;
      const size_t blocks = (skip + taken + kPerBlock - 1) / kPerBlock;
      Isa::blocks(words, key, first / kPerBlock, blocks);
      if (taken == kChunk) {
        convert<Kind>(out, words, kChunk, constants);
      } else {  // the range begins or ends within a block
        convert<Kind>(buffer, words, blocks * kPerBlock, constants);
        memcpy(out, buffer + skip, taken * sizeof(Out));
      }
      out += taken;
      first += taken;
      count -= taken;
    }
  }
};

}  // namespace
}  // namespace phx::random
