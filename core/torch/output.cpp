// Checks of an `out` argument, and what a fresh one is told.
#include "output.h"

#include <sys/mman.h>
#include <unistd.h>

namespace phxt {

void expect_first_touch(void *data, size_t size) {
  constexpr size_t kLarge = size_t{4} << 20;
  if (size < kLarge) return;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + size) / page * page;
  madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
}

Operand caller_output(const Call &call, const Tensor &out, const Operand &like, int64_t numel) {
  const int32_t gpu = gpu_of(out);
  if (gpu != call.gpu) call.refuse("input is on " + device_name(call.gpu) + ", but out is on " + device_name(gpu));
  Operand result = write_operand(out, gpu);
  if (result.dtype != like.dtype)
    call.refuse(std::string("out must have the dtype of input, but input is ") + like.type.name + " and out " +
                result.type.name);
  if (result.numel != numel)
    call.refuse("out must have " + std::to_string(numel) + " elements, but has " + std::to_string(result.numel));
  return result;
}

}  // namespace phxt
