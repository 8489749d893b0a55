// Reads a struct from a caller whose version of it may be shorter than ours; what it lacks is zero.
#pragma once

#include <cstring>

#include "base/error.h"

namespace phx {

template <class T>
phx_status read_in(const T *in, T *out, const char *operation) {
  uint32_t size = 0;
  std::memcpy(&size, in, sizeof size);
  if (size < sizeof size || size > sizeof(T) * 16)
    return fail(PHX_ERR_ABI, operation, "%s: struct_size is %u; set it to sizeof the struct before the call", operation,
                size);
  *out = T{};
  std::memcpy(static_cast<void *>(out), in, size < sizeof(T) ? size : sizeof(T));
  return PHX_OK;
}

}  // namespace phx
