// The loop that fills a stretch: some blocks into the first-level cache, then from these the elements.
//
// Isa::blocks(words, key, number, count) writes the words of `count` blocks from `number` on, and may write up to the
// next multiple of Isa::kWidth blocks. The second loop is plain code, which the compiler makes vectors of.
#pragma once

#include "kernels/random_kinds.h"

namespace phx::random {
namespace {

constexpr size_t kBlocks = 256;  // 4 KiB of words: with what is written, well inside the first-level cache

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
    // Through a buffer, since the compiler makes no vectors of pairs that are stored as something else.
    using Real = typename Kind::Real;
    constexpr size_t kStep = 256;
    alignas(64) Real some[kStep];
    for (size_t at = 0; at < count; at += kStep) {
      const size_t taken = count - at < kStep ? count - at : kStep;
      for (size_t i = 0; i < taken; i += 2) {
        const auto two = Kind::real(word_at<Kind>(words, at + i), word_at<Kind>(words, at + i + 1), constants);
        some[i] = two.first;
        some[i + 1] = two.second;
      }
      for (size_t i = 0; i < taken; ++i) out[at + i] = Element<typename Kind::Out>::store(some[i]);
    }
  } else {
    for (size_t i = 0; i < count; ++i) out[i] = Kind::one(word_at<Kind>(words, i), constants);
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
    constexpr size_t kEach = 16 / sizeof(typename Kind::Word), kChunk = kBlocks * kEach;
    static_assert(kBlocks % Isa::kWidth == 0, "room for what blocks() writes beyond");
    const typename Kind::Constants constants(settings);
    alignas(64) uint32_t words[kBlocks * 4];
    alignas(64) Out some[kChunk];
    Out *out = static_cast<Out *>(to);
    while (count > 0) {
      const size_t skip = static_cast<size_t>(first % kEach);
      const size_t taken = count < kChunk - skip ? count : kChunk - skip;
      const size_t blocks = (skip + taken + kEach - 1) / kEach;
      Isa::blocks(words, key, first / kEach, blocks);
      if (taken == kChunk) {
        convert<Kind>(out, words, kChunk, constants);
      } else {  // it begins or ends within a block
        convert<Kind>(some, words, blocks * kEach, constants);
        memcpy(out, some + skip, taken * sizeof(Out));
      }
      out += taken;
      first += taken;
      count -= taken;
    }
  }
};

}  // namespace
}  // namespace phx::random
