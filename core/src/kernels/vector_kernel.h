// The reduction loop over vectors of any width, as templates over (instruction set, element, op).
//
// See vector_elements.h for how it is written, and select.h for why everything is in an unnamed namespace.
#pragma once

#include "kernels/vector_elements.h"

namespace phx::kernels {
namespace {

// ---- the loop ---------------------------------------------------------------------------------------------------

// Returns where the step at byte `at` of input k lies: in the input, or in a padded copy if that is too short.
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

// Stores results to one output, or over every input, which all must be writable then.
struct IntoOne {
  char *out;
  template <class L, int kSteps, class Sums>
  PHX_ALWAYS_INLINE void store(size_t at, const Sums *sum) const {
    for (int s = 0; s < kSteps; ++s) L::store(out + at + s * L::kBytes, sum + s * L::kVectors);
  }
  PHX_ALWAYS_INLINE void copy(size_t at, const char *from, size_t bytes) const { std::memcpy(out + at, from, bytes); }
};
struct IntoAll {
  const void *const *in;
  int n;
  PHX_ALWAYS_INLINE char *block(int k) const { return static_cast<char *>(const_cast<void *>(in[k])); }
  template <class L, int kSteps, class Sums>
  PHX_ALWAYS_INLINE void store(size_t at, const Sums *sum) const {
    for (int k = 0; k < n; ++k) IntoOne{block(k)}.template store<L, kSteps>(at, sum);
  }
  PHX_ALWAYS_INLINE void copy(size_t at, const char *from, size_t bytes) const {
    for (int k = 0; k < n; ++k) std::memcpy(block(k) + at, from, bytes);
  }
};

// Reduces kSteps steps at once, so that their dependency chains overlap. All inputs are read before anything is
// written, so results may go into inputs. The accumulators stay in registers whatever n is.
template <class L, int kSteps, class Into, class Op, class Where>
PHX_ALWAYS_INLINE void reduce_steps(const Into &into, size_t at, Where &&where, int n, const Op &op) {
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
  into.template store<L, kSteps>(at, sum);
}

// Reduces the bytes from `begin` to `end` of every input.
template <class L, class Into, class Op>
PHX_ALWAYS_INLINE void reduce_between(const Into &into, const void *const *in, int n, size_t begin, size_t end,
                                      const Op &op) {
  constexpr size_t kStep = L::kBytes;
  constexpr int kUnroll = 4 / L::kVectors;
  const size_t bytes = end - begin;
  alignas(64) char last[kStep];
  if (bytes < kStep) {
    if (bytes == 0) return;
    reduce_steps<L, 1>(IntoOne{last}, 0, Padded<L::kBytes>{in, begin, bytes, {}}, n, op);
    into.copy(begin, last, bytes);
    return;
  }
  // The last step may overlap the one before it. It is computed first, before results overwrite any input.
  const size_t last_at = end - kStep;
  reduce_steps<L, 1>(IntoOne{last}, 0, InPlace{in, last_at}, n, op);
  size_t at = begin;
  for (; at + kUnroll * kStep <= end; at += kUnroll * kStep) reduce_steps<L, kUnroll>(into, at, InPlace{in, at}, n, op);
  for (; at < last_at; at += kStep) reduce_steps<L, 1>(into, at, InPlace{in, at}, n, op);
  into.copy(last_at, last, kStep);
}

// Not inline, because the code is long and each kernel needs it more than once. kIntoAll: `out` is not used.
template <class L, bool kIntoAll, class Op>
__attribute__((noinline)) void reduce_range(char *out, const void *const *in, int n, size_t begin, size_t end,
                                            const Op &op) {
  // Pairs of ranks have two inputs, and so do exchanges. A constant 2 lets the compiler drop the loop over inputs,
  // whose cost is nothing compared with the work of f8.
  if constexpr (kIntoAll) {
    reduce_between<L>(IntoAll{in, n}, in, n, begin, end, op);
  } else if (n == 2 && L::kVectors < 4) {
    const void *const two[2] = {in[0], in[1]};
    reduce_between<L>(IntoOne{out}, two, 2, begin, end, op);
  } else {
    reduce_between<L>(IntoOne{out}, in, n, begin, end, op);
  }
}

// ---- long inputs ------------------------------------------------------------------------------------------------

// Inputs from this size on are assumed not to be in the first-level cache, but in memory or in the cache of the core
// that wrote them. The hardware prefetcher is too slow for them, above all if another core has the lines: prefetching
// each line kAhead bytes early makes reductions of 2 MiB from another core's cache 1.5 times as fast (bf16, 2 inputs:
// from 19 to 29 GB/s; benchmarks/kernels.cpp --remote). Distances from 0.5 to 4 KiB give the same. Four pages side by
// side, as in copy.cpp, gain less here, where several inputs are several streams already, and lose with many inputs.
constexpr size_t kWideBytes = size_t{16} << 10;
constexpr size_t kAhead = 1024;
constexpr size_t kLine = 64;

// Prefetches a line that is going to be both read and overwritten: one transfer from the core that has it instead of
// two. In assembly, because compilers use it only if all processors of their target have it; on others it does nothing.
PHX_ALWAYS_INLINE void take_over(const char *line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*line));
#else
  __builtin_prefetch(line, 1);
#endif
}

// Reduces from `at` on, up to kAhead before `end`: it must not prefetch beyond the inputs, because another core may be
// about to write such a line. Returns where it stopped.
template <class Isa, class L, Results kResults, class Op>
PHX_ALWAYS_INLINE size_t reduce_ahead(char *out, const void *const *in, int n, size_t at, size_t end, const Op &op) {
  constexpr int kUnroll = 4 / L::kVectors;
  constexpr size_t kSteps = kUnroll * L::kBytes, kVisit = kSteps < kLine ? kLine : kSteps;
  for (; at + kVisit + kAhead <= end; at += kVisit) {
    for (int k = 0; k < n; ++k)
      for (size_t line = 0; line < kVisit; line += kLine) {
        const char *const ahead = static_cast<const char *>(in[k]) + at + kAhead + line;
        if constexpr (kResults == Results::kIntoAll)
          take_over(ahead);
        else
          __builtin_prefetch(ahead);
      }
    for (size_t i = at; i < at + kVisit; i += kSteps) {
      if constexpr (kResults == Results::kStreamed) {
        using Stored = Vector<long long, L::kBytes>;
        alignas(kLine) char steps[kSteps];  // the compiler leaves it in registers
        reduce_steps<L, kUnroll>(IntoOne{steps}, 0, InPlace{in, i}, n, op);
        for (size_t s = 0; s < kSteps; s += L::kBytes) Isa::stream(out + i + s, Stored::load(steps + s));
      } else if constexpr (kResults == Results::kIntoAll) {
        reduce_steps<L, kUnroll>(IntoAll{in, n}, i, InPlace{in, i}, n, op);
      } else {
        reduce_steps<L, kUnroll>(IntoOne{out}, i, InPlace{in, i}, n, op);
      }
    }
  }
  if constexpr (kResults == Results::kStreamed) Isa::fence();  // streaming stores are not ordered without it
  return at;
}

template <class Isa, class L, Results kResults, class Op>
PHX_ALWAYS_INLINE void reduce(void *to, const void *const *in, int n, size_t count, const Op &op) {
  char *const out = static_cast<char *>(to);
  const size_t bytes = count * L::kElement;
  size_t at = 0;
  if constexpr (kResults == Results::kIntoAll) {
    // A constant 2 for the most frequent case: see reduce_range.
    if (bytes >= kWideBytes) {
      const void *const two[2] = {in[0], in[n > 1]};
      at = n == 2 ? reduce_ahead<Isa, L, kResults>(nullptr, two, 2, 0, bytes, op)
                  : reduce_ahead<Isa, L, kResults>(nullptr, in, n, 0, bytes, op);
    }
  } else if (bytes >= kWideBytes) {
    const size_t head = (kLine - reinterpret_cast<uintptr_t>(out) % kLine) % kLine;
    if (kResults == Results::kStreamed && head % L::kElement == 0) {
      reduce_range<L, false>(out, in, n, 0, head, op);
      at = reduce_ahead<Isa, L, kResults>(out, in, n, head, bytes, op);
    } else if (kResults == Results::kStored) {
      at = reduce_ahead<Isa, L, kResults>(out, in, n, 0, bytes, op);
    }
  }
  reduce_range<L, kResults == Results::kIntoAll>(out, in, n, at, bytes, op);
}

template <class Isa, Results kResults>
struct VectorKernels {
  template <class E, class Op>
  static void run(void *out, const void *const *in, int n, size_t count, int64_t divisor, double scale) {
    using L = Lanes<Isa, E>;
    using T = typename L::Acc;
    if constexpr (std::is_same_v<Op, Average> && std::is_floating_point_v<T>) {
      if ((divisor & (divisor - 1)) == 0) {
        reduce<Isa, L, kResults>(out, in, n, count, FloatAverage<Isa, T, true>(divisor, scale));
      } else {
        reduce<Isa, L, kResults>(out, in, n, count, FloatAverage<Isa, T, false>(divisor, scale));
      }
    } else if constexpr (kIsComplex<E>) {
      reduce<Isa, L, kResults>(out, in, n, count, ComplexProduct<Isa, T>(divisor, scale));
    } else {
      reduce<Isa, L, kResults>(out, in, n, count, Combine<Isa, T, Op>(divisor, scale));
    }
  }
};

template <class Isa>
ReduceFn find(int32_t dtype, int32_t op, Results results) {
  if (results == Results::kIntoAll) return select<VectorKernels<Isa, Results::kIntoAll>>(dtype, op);
  if constexpr (Isa::kStreams)
    if (results == Results::kStreamed) return select<VectorKernels<Isa, Results::kStreamed>>(dtype, op);
  return select<VectorKernels<Isa, Results::kStored>>(dtype, op);
}

}  // namespace
}  // namespace phx::kernels
