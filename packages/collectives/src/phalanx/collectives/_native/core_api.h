// The functions of libphalanx_torch.so (phalanx_torch.h), which Python has loaded; `connect` sets them.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstddef>
#include <cstdint>

namespace phalanx_native {

using Kernel = int32_t (*)(StableIValue *stack, uint64_t inputs, uint64_t outputs);
struct Library {
  Kernel (*kernel_of)(const char *op);
  const char *(*last_error)();
  int32_t (*take_interrupted)(void **type, void **exception);
  int32_t (*all_reduce)(const void *in, void *out, int64_t numel, int32_t torch_dtype, const char *reduce_op,
                        size_t reduce_op_size, const char *group_name, size_t group_name_size);
};
extern Library library;

// Raises the error that a function of the library returned as a status. The caller must not hold the GIL.
void raise_on(int32_t status);

}  // namespace phalanx_native
