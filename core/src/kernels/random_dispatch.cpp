// Chooses the instruction set: the one that the reductions use, or scalar if there is no random kernel for that.
#include <cstring>

#include "kernels/kernels.h"
#include "kernels/random.h"

namespace phx::random {
namespace {

using Find = FillFn (*)(int32_t kind, int32_t dtype);

Find finder([[maybe_unused]] const char *isa) {  // without vector kernels there is one answer
#if defined(PHX_VECTOR_KERNELS) && defined(__x86_64__)
  if (std::strcmp(isa, "avx512") == 0) return &find_avx512;
  if (std::strcmp(isa, "avx2") == 0) return &find_avx2;
#endif
  return &find_scalar;  // the compiler vectorizes this for NEON
}

}  // namespace

FillFn find_fill(int32_t kind, int32_t dtype) {
  static const Find find = finder(kernels::active_isa());
  return find(kind, dtype);
}

FillFn find_fill_isa(const char *isa, int32_t kind, int32_t dtype) {
  // The host and the build have an instruction set if they have its reductions.
  if (kernels::find_reduce_isa(isa, PHX_DTYPE_F32, PHX_OP_SUM) == nullptr) return nullptr;
  return finder(isa)(kind, dtype);
}

}  // namespace phx::random
