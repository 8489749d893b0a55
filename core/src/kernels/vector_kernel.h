// The reduction loop over vectors of any width, as templates over (instruction set, element, op).
//
// See vector_elements.h for how it is written, and select.h for why all is in an unnamed namespace.
#pragma once

#include <cstring>

#include "kernels/vector_ops.h"

namespace phx::kernels {
namespace {

// ---- the loop ---------------------------------------------------------------------------------------------------

// Where step `at` of input k is: in place, or, when the inputs are shorter than one step, in a padded copy.
struct InPlace {
  const void *const *in;
  size_t at;
  PHX_ALWAYS_INLINE const char *operator()(int k) const { return static_cast<const char *>(in[k]) + at; }
};
template <int kBytes>
struct Padded {
  const void *const *in;
  size_t at, bytes;
  alignas(kBytes) char copy[kBytes];
  PHX_ALWAYS_INLINE const char *operator()(int k) {
    std::memcpy(copy, static_cast<const char *>(in[k]) + at, bytes);
    return copy;
  }
};

// kSteps steps at once, so that their dependency chains overlap. All inputs are read before anything is written, so
// `out` may be one of them. The accumulators stay in registers whatever n is.
template <class L, int kSteps, class Op, class Where>
PHX_ALWAYS_INLINE void reduce_steps(char *out, Where &&where, int n, const Op &op) {
  constexpr int kVectors = kSteps * L::kVectors;
  typename L::V::Type sum[kVectors], x[kVectors];
  const char *from = where(0);
  for (int s = 0; s < kSteps; ++s) L::load(sum + s * L::kVectors, from + s * L::kBytes);
  for (int v = 0; v < kVectors; ++v) sum[v] = op.prepare(sum[v]);
  for (int k = 1; k < n; ++k) {
    from = where(k);
    for (int s = 0; s < kSteps; ++s) L::load(x + s * L::kVectors, from + s * L::kBytes);
    for (int v = 0; v < kVectors; ++v) sum[v] = op.combine(sum[v], op.prepare(x[v]));
  }
  for (int v = 0; v < kVectors; ++v) sum[v] = op.finish(sum[v]);
  for (int s = 0; s < kSteps; ++s) L::store(out + s * L::kBytes, sum + s * L::kVectors);
}

// Bytes from `begin` to `end` of every input and of `out`.
template <class L, class Op>
PHX_ALWAYS_INLINE void reduce_between(char *out, const void *const *in, int n, size_t begin, size_t end, const Op &op) {
  constexpr size_t kStep = L::kBytes;
  constexpr int kUnroll = 4 / L::kVectors;
  const size_t bytes = end - begin;
  alignas(64) char last[kStep];
  if (bytes < kStep) {
    if (bytes == 0) return;
    reduce_steps<L, 1>(last, Padded<L::kBytes>{in, begin, bytes, {}}, n, op);
    std::memcpy(out + begin, last, bytes);
    return;
  }
  // The last step may overlap the one before it. It is computed first, while `out` still holds its input.
  const size_t last_at = end - kStep;
  reduce_steps<L, 1>(last, InPlace{in, last_at}, n, op);
  size_t at = begin;
  for (; at + kUnroll * kStep <= end; at += kUnroll * kStep) reduce_steps<L, kUnroll>(out + at, InPlace{in, at}, n, op);
  for (; at < last_at; at += kStep) reduce_steps<L, 1>(out + at, InPlace{in, at}, n, op);
  std::memcpy(out + last_at, last, kStep);
}

// Not inline: the code is long, and each kernel needs it more than once.
template <class L, class Op>
__attribute__((noinline)) void reduce_range(char *out, const void *const *in, int n, size_t begin, size_t end,
                                            const Op &op) {
  // Two inputs are what pairs and exchanges have; knowing it lets the compiler drop the loop over inputs. Beside the
  // work that f8 makes, that loop is nothing.
  if (n == 2 && L::kVectors < 4) {
    const void *const two[2] = {in[0], in[1]};
    reduce_between<L>(out, two, 2, begin, end, op);
  } else {
    reduce_between<L>(out, in, n, begin, end, op);
  }
}

// ---- long inputs ------------------------------------------------------------------------------------------------

// Inputs from this size on are taken to be out of the first-level cache, in memory or in the cache of the core that
// wrote them. The hardware prefetcher is too timid for them, above all where another core has the lines: asking for
// each line kAhead bytes early makes reductions out of another core's 2 MiB half as fast again (bf16, 2 inputs: from 19
// to 29 GB/s; benchmarks/kernels.cpp --remote). Distances from 0.5 to 4 KiB are alike. What copy.cpp does, four pages
// side by side, gains less here, where several inputs are several streams already, and loses with many.
constexpr size_t kWideBytes = size_t{16} << 10;
constexpr size_t kAhead = 1024;
constexpr size_t kLine = 64;

// From `at` on as far as kAhead before `end`: nothing beyond the inputs is asked for, because that may be a line that
// another core is about to write. Returns where it stopped.
template <class Isa, class L, bool kStreaming, class Op>
PHX_ALWAYS_INLINE size_t reduce_ahead(char *out, const void *const *in, int n, size_t at, size_t end, const Op &op) {
  constexpr int kUnroll = 4 / L::kVectors;
  constexpr size_t kSteps = kUnroll * L::kBytes, kVisit = kSteps < kLine ? kLine : kSteps;
  for (; at + kVisit + kAhead <= end; at += kVisit) {
    for (int k = 0; k < n; ++k)
      for (size_t line = 0; line < kVisit; line += kLine)
        __builtin_prefetch(static_cast<const char *>(in[k]) + at + kAhead + line);
    for (size_t i = at; i < at + kVisit; i += kSteps) {
      if constexpr (kStreaming) {
        using Stored = Vector<long long, L::kBytes>;
        alignas(kLine) char steps[kSteps];  // the compiler leaves it in registers
        reduce_steps<L, kUnroll>(steps, InPlace{in, i}, n, op);
        for (size_t s = 0; s < kSteps; s += L::kBytes) Isa::stream(out + i + s, Stored::load(steps + s));
      } else {
        reduce_steps<L, kUnroll>(out + i, InPlace{in, i}, n, op);
      }
    }
  }
  if constexpr (kStreaming) Isa::fence();  // such stores are not ordered with later ones by themselves
  return at;
}

// kStreaming: past the caches, where `out` permits.
template <class Isa, class L, bool kStreaming, class Op>
PHX_ALWAYS_INLINE void reduce(void *to, const void *const *in, int n, size_t count, const Op &op) {
  char *const out = static_cast<char *>(to);
  const size_t bytes = count * L::kElement;
  size_t at = 0;
  if (bytes >= kWideBytes) {
    const size_t head = (kLine - reinterpret_cast<uintptr_t>(out) % kLine) % kLine;
    if (kStreaming && head % L::kElement == 0) {
      reduce_range<L>(out, in, n, 0, head, op);
      at = reduce_ahead<Isa, L, kStreaming>(out, in, n, head, bytes, op);
    } else if (!kStreaming) {
      at = reduce_ahead<Isa, L, false>(out, in, n, 0, bytes, op);
    }
  }
  reduce_range<L>(out, in, n, at, bytes, op);
}

template <class T>
constexpr bool kIsFloat = static_cast<T>(0.5) != 0;
template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <class Isa, bool kStreaming>
struct VectorKernels {
  template <class E, class Op>
  static void run(void *out, const void *const *in, int n, size_t count, int64_t divisor, double scale) {
    using L = Lanes<Isa, E>;
    using T = typename L::Acc;
    if constexpr (kSame<Op, Average> && kIsFloat<T>) {
      if ((divisor & (divisor - 1)) == 0) {
        reduce<Isa, L, kStreaming>(out, in, n, count, SumHalved<Isa, T>(divisor, scale));
      } else {
        reduce<Isa, L, kStreaming>(out, in, n, count, SumDivided<Isa, T>(divisor, scale));
      }
    } else if constexpr (kIsComplex<E>) {
      reduce<Isa, L, kStreaming>(out, in, n, count, ComplexProduct<Isa, T>(divisor, scale));
    } else {
      reduce<Isa, L, kStreaming>(out, in, n, count, Combine<Isa, T, Op>(divisor, scale));
    }
  }
};

}  // namespace
}  // namespace phx::kernels
