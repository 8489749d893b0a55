// The kernels in plain C++: for every processor, and the reference for the others.
//
// Reductions: each chunk passes through accumulators that stay in the first-level cache, in loops without branches, for
// which compilers use the vector instructions that their target always has (SSE2, NEON).
#include "kernels/portable.h"
#include "kernels/random_fill_kernel.h"

namespace phx::kernels {
namespace {

template <class E>
inline typename Element<E>::Acc load(const char *from, size_t i) {
  typename Element<E>::Raw raw;
  std::memcpy(&raw, from + i * sizeof raw, sizeof raw);  // alignment is not promised
  return Element<E>::widen(raw);
}
template <class E>
inline void store(char *to, size_t i, typename Element<E>::Acc acc) {
  const typename Element<E>::Raw raw = Element<E>::narrow(acc);
  std::memcpy(to + i * sizeof raw, &raw, sizeof raw);
}

// Each loop is a separate function, or GCC 12 treats them as one loop nest, interchanges them, and vectorizes nothing.
template <class E, class Acc, class Op>
__attribute__((noinline)) void begin(Acc *__restrict sum, const char *__restrict from, size_t length, const Op &op) {
  for (size_t i = 0; i < length; ++i) sum[i] = op.prepare(load<E>(from, i));
}
template <class E, class Acc, class Op>
__attribute__((noinline)) void add(Acc *__restrict sum, const char *__restrict from, size_t length, const Op &op) {
  for (size_t i = 0; i < length; ++i) sum[i] = op.combine(sum[i], op.prepare(load<E>(from, i)));
}
template <class E, class Acc, class Op>
__attribute__((noinline)) void end(const Acc *__restrict sum, char *__restrict to, size_t length, const Op &op) {
  for (size_t i = 0; i < length; ++i) store<E>(to, i, op.finish(sum[i]));
}

template <bool kIntoAll>
struct ScalarKernels {
  template <class E, class Op>
  static void run(void *out, const void *const *in, int n, size_t count, int64_t divisor, double scale) {
    using Acc = typename Element<E>::Acc;
    const Combine<Acc, Op> op(divisor, scale);
    constexpr size_t kChunk = 256;
    Acc sum[kChunk];
    for (size_t at = 0; at < count; at += kChunk) {
      const size_t length = count - at < kChunk ? count - at : kChunk;
      const size_t offset = at * sizeof(typename Element<E>::Raw);
      begin<E>(sum, static_cast<const char *>(in[0]) + offset, length, op);
      for (int k = 1; k < n; ++k) add<E>(sum, static_cast<const char *>(in[k]) + offset, length, op);
      if (!kIntoAll) end<E>(sum, static_cast<char *>(out) + offset, length, op);
      for (int k = 0; kIntoAll && k < n; ++k)
        end<E>(sum, static_cast<char *>(const_cast<void *>(in[k])) + offset, length, op);
    }
  }
};

}  // namespace

ReduceFn find_scalar(int32_t dtype, int32_t op, Results results) {
  return results == Results::kIntoAll ? select<ScalarKernels<true>>(dtype, op)
                                      : select<ScalarKernels<false>>(dtype, op);
}

}  // namespace phx::kernels

namespace phx::random {
namespace {

struct Scalar {
  static constexpr size_t kWidth = 1;
  static void blocks(uint32_t *words, uint64_t key, uint64_t number, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const Block block = block_of(key, number + i);
      memcpy(words + 4 * i, block.word, sizeof block.word);
    }
  }
};

}  // namespace

FillFn find_scalar(int32_t kind, int32_t dtype) { return select<Fill<Scalar>>(kind, dtype); }

}  // namespace phx::random
