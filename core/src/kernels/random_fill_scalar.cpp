// The kernels for any processor.
#include "kernels/random_fill_kernel.h"

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
